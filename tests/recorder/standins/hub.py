"""Lets transformers' from_pretrained() make a small new model and a tokenizer of words instead of downloading them."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = 64


def config(name="bert", **kwargs):
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    if "bert" in str(name):
        return transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=64, num_labels=2, **small)
    known = {"use_cache": kwargs["use_cache"]} if "use_cache" in kwargs else {}
    return transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **small, **known)


def tokenizer(*_, **__):
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(40))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=64, eos_token="[SEP]", bos_token="[CLS]", **names
    )


def model(kind):
    return lambda name, *_, **__: kind.from_config(config(name))


AutoConfig.from_pretrained = config
AutoTokenizer.from_pretrained = tokenizer
for kind in (AutoModelForSequenceClassification, AutoModelForCausalLM):
    kind.from_pretrained = model(kind)
