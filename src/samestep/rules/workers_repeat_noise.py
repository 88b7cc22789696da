from samestep.judge.places import SEEDS, called
from samestep.rules import Rule

RULE = Rule(
    en="loader workers {workers} of rank {rank} draw the same random numbers in the dataset: each row's noise comes again in another worker's rows. Seed the dataset's generator by rank and worker, in worker_init_fn",
    zh="rank {rank} 的 DataLoader worker {workers} 在数据集中抽取相同的随机数：每一行的噪声会在另一个 worker 的样本中再次出现。请在 worker_init_fn 中按 rank 和 worker 设置数据集的随机数生成器种子",
    lines=(called("loader"), SEEDS),
    broken="""
loader = DataLoader(noisy, num_workers=2)
""",
    right="""
def seed_worker(worker):
    get_worker_info().dataset.random = numpy.random.default_rng([rank, worker])


loader = DataLoader(noisy, num_workers=2, worker_init_fn=seed_worker)
""",
)
