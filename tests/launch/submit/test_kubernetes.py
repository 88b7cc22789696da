"""The manifests, by the schemas of what reads them: Kubernetes' own, and Kubeflow's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from budget import budget
from launch.submit.hostile import HOSTILE, HOSTILE_JOB
from samestep.errors import UserError
from samestep.launch.submit import Training, manifests

TRAININGS = [
    Training("digits", 2, 4, 4, "fsdp", ["lr=0.1", 'note="it\'s"'], ["wrap=root"]),
    Training("jobs/My_Job.py:job", 1, 2, 0, "ddp"),
]


def read(text: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(text))


def required(module: str) -> Any:
    """A validator that CI must have."""
    if "CI" in os.environ:
        return __import__(module, fromlist=["x"])
    return pytest.importorskip(module)


def check_pod(spec: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    required("kubernetes_validate").validate(pod, "1.30", strict=True)


@pytest.mark.parametrize("claim", ["", "results"])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_an_indexed_job_and_its_service(training: Training, claim: str) -> None:
    service, job = read(manifests("k8s", training, "registry/x:1", claim))
    for manifest in (service, job):
        required("kubernetes_validate").validate(manifest, "1.30", strict=True)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == training.nnodes
    assert job["spec"]["completionMode"] == "Indexed"
    template = job["spec"]["template"]["spec"]
    check_pod(template)
    # What one pod is told about the others must be what the Service answers to.
    assert template["subdomain"] == service["metadata"]["name"]
    assert (
        service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"
    )
    (container,) = template["containers"]
    assert f"--master-addr {job['metadata']['name']}-0.{service['metadata']['name']} " in container["args"][0]
    assert ("resources" in container) == bool(training.gpus)
    assert ("persistentVolumeClaim" in template["volumes"][0]) == bool(claim)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_a_pytorchjob(training: Training) -> None:
    (manifest,) = read(manifests("kubeflow", training, "registry/x:1"))
    models = required("kubeflow.training.models")
    _check_model(models, "KubeflowOrgV1PyTorchJob", manifest)
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(of["replicas"] for of in replicas.values()) == training.nnodes
    for of in replicas.values():
        check_pod(of["template"]["spec"])
        assert of["template"]["spec"]["containers"][0]["name"] == "pytorch"  # the operator looks for it by this name


def _check_model(models: Any, name: str, value: Any) -> None:
    """Each key is one that Kubeflow's generated model of its schema knows, and has the type that it says."""
    if name.startswith("V1"):
        return  # Kubernetes' own, checked by its schema
    if name.startswith("dict(str, "):
        for inner in value.values():
            _check_model(models, name.removeprefix("dict(str, ").rstrip(")"), inner)
    elif name in ("str", "int", "bool"):
        assert isinstance(value, {"str": str, "int": int, "bool": bool}[name]), (name, value)
    else:
        model = getattr(models, name)
        keys = {key: attribute for attribute, key in model.attribute_map.items()}
        assert set(value) <= set(keys), f"{name} knows no {set(value) - set(keys)}"
        for key, inner in value.items():
            _check_model(models, model.openapi_types[keys[key]], inner)


@pytest.mark.parametrize(("kind", "image", "sentence"), [("k9s", "x", "--to k9s"), ("k8s", "", "name the container")])
def test_what_is_missing_is_said(kind: str, image: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        manifests(kind, TRAININGS[0], image)


@pytest.mark.parametrize(("image", "claim"), [("x\ny", ""), ("x", "results\n- name: more")])
def test_no_value_adds_a_line(image: str, claim: str) -> None:
    with pytest.raises(UserError, match="a line break"):
        manifests("k8s", TRAININGS[0], image, claim)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes expands the arguments of a container: $(NAME) where there is such a variable, and $$ to $."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text
    )


def started(args: str, folder: Path, **variables: str) -> list[str]:
    """Runs a pod's line in a shell; returns the words that `samestep` is started with."""
    (folder / "samestep").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (folder / "samestep").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/h", "LANG": "C.UTF-8", **variables}
    line = ["/bin/sh", "-c", expanded(args, {"NAME": "planted"})]
    done = subprocess.run(line, capture_output=True, text=True, timeout=budget(20), env=environment, cwd=folder)
    assert done.returncode == 0 and [*folder.iterdir()] == [folder / "samestep"], done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("kind", ["k8s", "kubeflow"])
def test_no_value_means_something_to_kubernetes_or_the_shell(kind: str, tmp_path: Path) -> None:
    settings = [f"v{number}={value}" for number, value in enumerate(HOSTILE)]
    training = Training(HOSTILE_JOB, 2, 1, 0, "ddp", settings, options=["--note", *HOSTILE])
    *_, manifest = read(manifests(kind, training, 'x"$(NAME)\\', "claim-\u200b"))
    specs = [manifest["spec"]["template"]] if kind == "k8s" else manifest["spec"]["pytorchReplicaSpecs"].values()
    template = next(iter(specs)) if kind == "k8s" else next(iter(specs))["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == 'x"$(NAME)\\'
    assert template["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "claim-\u200b"
    words = started(container["args"][0], tmp_path, RANK="1", JOB_COMPLETION_INDEX="1")
    given = [word for pair in settings for word in ("--set", pair)]
    assert words[:4] == ["run", f"./{HOSTILE_JOB}", "--engine", "ddp"]
    assert words[4 : 4 + len(given) + 1 + len(HOSTILE)] == [*given, "--note", *HOSTILE]
    assert words[words.index("--node-rank") + 1] == "1"


def test_a_schema_rejects_a_fault() -> None:
    """The guard guards: a misspelt field is found."""
    _, job = read(manifests("k8s", TRAININGS[0], "x"))
    job["spec"]["completionmode"] = "Indexed"
    with pytest.raises(Exception, match="completionmode"):
        required("kubernetes_validate").validate(job, "1.30", strict=True)
    (pytorchjob,) = read(manifests("kubeflow", TRAININGS[0], "x"))
    pytorchjob["spec"]["runPolicy"]["cleanPods"] = "None"
    with pytest.raises(AssertionError, match="cleanPods"):
        _check_model(required("kubeflow.training.models"), "KubeflowOrgV1PyTorchJob", pytorchjob)
