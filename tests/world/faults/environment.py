"""Faults of the environment: locale, Python, torch, the engines' packages, variables."""

from __future__ import annotations

from world.faults.fault import Fault, env

FAULTS = (
    env("no UTF-8", "locale", "UnicodeDecodeError", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"),
    env("another environment is active", "installation", "is active", VIRTUAL_ENV="/opt/other"),
    Fault(
        "torchrun of another environment",
        "installation",
        "the torchrun in PATH",
        'mkdir $T/bin; printf "#!/opt/other/bin/python\\n" >$T/bin/torchrun; chmod +x $T/bin/torchrun; '
        'PATH=$T/bin:$PATH "$@"',
    ),
    Fault("a torch.py beside the job", "installation", "hides", 'cd $T; touch torch.py; "$@"'),
    env("NCCL_SOCKET_IFNAMES", "variables", "NCCL_SOCKET_IFNAME?", NCCL_SOCKET_IFNAMES="lo"),
    env("TORCH_DISTRIBUTED_DEBUG=on", "variables", "OFF, INFO, DETAIL", TORCH_DISTRIBUTED_DEBUG="on"),
    env("TORCH_DISTRIBUTED_DEBUG=DETAIL", "variables", "slows", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    env("an older name of NCCL's", "variables", "is now", NCCL_ASYNC_ERROR_HANDLING="1"),
    env("quotes in a value", "variables", "quotes", NCCL_ALGO="'Ring'"),
    Fault(
        "a library does not import",
        "engine_packages",
        "accelerate",
        'mkdir -p $T/accelerate; echo "raise ImportError(\\"broken on purpose\\")" >$T/accelerate/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
    Fault(
        "torch does not import",
        "torch_build",
        "libcudart",
        'mkdir -p $T/torch; echo "raise ImportError(\\"libcudart.so.12: cannot open\\")" >$T/torch/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
)
