"""Knowledge distillation, as torch's tutorial: a student learns from labels and from a frozen teacher's soft
answers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe
from samestep.jobs.digits import read


class Classroom(nn.Module):
    """Teacher and student as one module, which an engine wraps; only the student trains."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False).eval(), student

    def train(self, mode: bool = True) -> "Classroom":
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def job(batch_size: int = 64, temperature: float = 2.0, share: float = 0.25, lr: float = 1e-3, epochs: int = 10) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float() / 16, scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # load its weights here
        return Classroom(teacher, nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)))

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        own, taught = (logits / temperature for logits in output)
        soft = F.kl_div(own.log_softmax(1), taught.softmax(1), reduction="batchmean") * temperature**2
        return share * soft + (1 - share) * F.cross_entropy(output[0], batch.targets)

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}, groups=lambda m: [{"params": list(m.student.parameters())}]),
        train=TensorDataset(images[:1500], labels[:1500]),
        evaluation=TensorDataset(images[1500:], labels[1500:]),
        metrics={"accuracy": lambda output, batch: output[0].argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
    )
