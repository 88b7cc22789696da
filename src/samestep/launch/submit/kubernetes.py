"""The manifests of a training under Kubernetes: an Indexed Job with a headless Service, or Kubeflow's PyTorchJob.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
"""

from __future__ import annotations

from samestep.errors import UserError
from samestep.launch.submit import Training, check_line, render
from samestep.world import RENDEZVOUS_PORT

KINDS = {"k8s": "kubernetes.yaml.j2", "kubeflow": "kubeflow.yaml.j2"}


def manifests(kind: str, training: Training, image: str, claim: str = "") -> str:
    """Returns YAML for `kubectl apply -f -`. kind: 'k8s' or 'kubeflow'. image: with samestep and the job.

    claim: a PersistentVolumeClaim for the results; without one they are deleted with the pods. Raises UserError for
    another kind, or without an image.
    """
    if kind not in KINDS:
        raise UserError(f"--to {kind}: manifests are written for {' and '.join(KINDS)}")
    if not image:
        raise UserError("name the container image that holds samestep and the job, as in --image registry/samestep:1")
    check_line("--image", image)
    check_line("--claim", claim)
    return render(KINDS[kind], training=training, image=image, claim=claim, port=RENDEZVOUS_PORT)
