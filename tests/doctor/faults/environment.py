"""Faults of the environment: locale, Python, torch, the engines' packages, variables."""

from __future__ import annotations

from doctor.faults.fault import Fault, env

FAULTS = (
    env("no UTF-8", "locale", "encoding_is_not_utf8", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"),
    env("another environment is active", "installation", "another_environment_is_active", VIRTUAL_ENV="/opt/other"),
    Fault(
        "torchrun of another environment",
        "installation",
        "torchrun_is_of_another_environment",
        'mkdir $T/bin; printf "#!/opt/other/bin/python\\n" >$T/bin/torchrun; chmod +x $T/bin/torchrun; '
        'PATH=$T/bin:$PATH "$@"',
    ),
    Fault("a torch.py beside the job", "installation", "file_hides_module", 'cd $T; touch torch.py; "$@"'),
    env("NCCL_SOCKET_IFNAMES", "variables", "variable_is_misspelt", NCCL_SOCKET_IFNAMES="lo"),
    env("TORCH_DISTRIBUTED_DEBUG=on", "variables", "variable_has_no_such_value", TORCH_DISTRIBUTED_DEBUG="on"),
    env("TORCH_DISTRIBUTED_DEBUG=DETAIL", "variables", "variable_slows_training", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    env("an older name of NCCL's", "variables", "variable_was_renamed", NCCL_ASYNC_ERROR_HANDLING="1"),
    env("quotes in a value", "variables", "variable_has_spaces_or_quotes", NCCL_ALGO="'Ring'"),
    Fault(
        "a library does not import",
        "engine_packages",
        "engine_package_does_not_import",
        'mkdir -p $T/accelerate; echo "raise ImportError(\\"broken on purpose\\")" >$T/accelerate/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
    Fault(
        "torch does not import",
        "torch_build",
        "torch_does_not_import",
        'mkdir -p $T/torch; echo "raise ImportError(\\"libcudart.so.12: cannot open\\")" >$T/torch/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
)
