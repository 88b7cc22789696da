"""The probe of every NCCL_*, GLOO_* and TORCH_* variable that is set: whether it helps here, and misspelt names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, MachineProbe, differences, fail, for_each, ok, quoted, unknown, warn
from samestep.message import Message, message
from samestep.world import nvidia

Needs = Literal["", "gpu", "infiniband", "several"]
PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
SWITCH, ON = ("0", "1"), ("1",)


@dataclass(frozen=True)
class Known:
    """An environment variable that NCCL, gloo or torch reads.

    needs: where it has an effect; '': everywhere. values: those that it takes; none: any. slows: the values that cost
    speed, and cost: why. instead: the name that has replaced it.
    """

    name: str
    needs: Needs = ""
    values: tuple[str, ...] = ()
    slows: tuple[str, ...] = ()
    cost: Message | None = None
    instead: str = ""

    @property
    def meaning(self) -> Message:
        return Message(self.name.lower())


SPECIAL = (
    Known("GLOO_DEVICE_TRANSPORT", values=("TCP", "TCP_TLS", "UV", "IBVERBS")),
    Known("NCCL_DEBUG", needs="gpu", values=("VERSION", "WARN", "INFO", "ABORT", "TRACE")),
    Known("NCCL_IB_DISABLE", needs="infiniband", values=SWITCH, slows=ON, cost=message("infiniband_is_not_used")),
    Known("NCCL_P2P_DISABLE", needs="gpu", values=SWITCH, slows=ON, cost=message("nvlink_is_not_used")),
    Known("NCCL_SHM_DISABLE", needs="gpu", values=SWITCH, slows=ON, cost=message("shared_memory_is_not_used")),
    Known("NCCL_BLOCKING_WAIT", needs="gpu", instead="TORCH_NCCL_BLOCKING_WAIT"),
    Known("NCCL_ASYNC_ERROR_HANDLING", needs="gpu", instead="TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    Known("NCCL_DESYNC_DEBUG", needs="gpu", instead="TORCH_NCCL_DESYNC_DEBUG"),
    Known(
        "TORCH_DISTRIBUTED_DEBUG",
        values=("OFF", "INFO", "DETAIL"),
        slows=("DETAIL",),
        cost=message("collectives_are_checked_first"),
    ),
    Known("TORCH_NCCL_BLOCKING_WAIT", needs="gpu", values=SWITCH, slows=ON, cost=message("collectives_block")),
    Known("TORCH_NCCL_ASYNC_ERROR_HANDLING", needs="gpu", values=("0", "1", "2", "3")),
    Known("TORCH_NCCL_TRACE_BUFFER_SIZE", instead="TORCH_FR_BUFFER_SIZE"),
    Known("TORCH_CPP_LOG_LEVEL", values=("INFO", "WARNING", "ERROR", "FATAL")),
)
NAMES: Mapping[Needs, str] = {
    "": """
        GLOO_SOCKET_IFNAME GLOO_LOG_LEVEL GLOO_DISABLE_CONNECTION_RETRIES GLOO_ENABLE_STORE_V2_API
        GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY
        GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE
        GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH TORCH_GLOO_LAZY_INIT TORCH_FR_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE
        TORCH_FR_DUMP_DYNAMIC_FILE_NAME TORCH_FR_CPP_STACK TORCH_SHOW_CPP_STACKTRACES TORCH_DISABLE_ADDR2LINE
        TORCH_LOGS TORCH_TRACE TORCH_COMPILE_DISABLE TORCH_COMPILE_DEBUG TORCH_COMPILE_BACKEND
        TORCH_DIST_INIT_BARRIER TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCH_ELASTIC_WORKER_IDENTICAL
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT TORCH_DISTRIBUTED_USE_TORCHCOMMS TORCH_DEVICE_BACKEND_AUTOLOAD
        TORCH_EXTENSIONS_DIR TORCH_HOME TORCH_HUB TORCH_FORCE_WEIGHTS_ONLY_LOAD TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
        TORCH_USE_RTLD_GLOBAL TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT
    """,
    "gpu": """
        NCCL_SOCKET_IFNAME NCCL_P2P_LEVEL NCCL_LAUNCH_MODE NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE
        NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_SOCKET_FAMILY NCCL_SOCKET_RETRY_CNT
        NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_CROSS_NIC NCCL_NET
        NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_CONF_FILE NCCL_ALGO
        NCCL_PROTO NCCL_NTHREADS NCCL_LL128_NTHREADS NCCL_THREAD_THRESHOLDS NCCL_BUFFSIZE NCCL_LL_BUFFSIZE
        NCCL_LL128_BUFFSIZE NCCL_P2P_NET_CHUNKSIZE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_NRINGS
        NCCL_MAX_NRINGS NCCL_RINGS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_CGA_CLUSTER_SIZE NCCL_CTA_POLICY
        NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_HOSTID
        NCCL_IGNORE_CPU_AFFINITY NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE
        NCCL_GRAPH_REGISTER NCCL_GRAPH_MIXING_SUPPORT NCCL_LOCAL_REGISTER NCCL_LEGACY_CUDA_REGISTER
        NCCL_SHM_USE_CUDA_MEMCPY NCCL_SHM_MEMCPY_MODE NCCL_SHM_LOCALITY NCCL_P2P_DIRECT_DISABLE
        NCCL_P2P_USE_CUDA_MEMCPY NCCL_P2P_PXN_LEVEL NCCL_PXN_DISABLE NCCL_PXN_C2C NCCL_P2P_PCI_RELAXED_ORDERING
        NCCL_NVLS_ENABLE NCCL_NVLS_CHUNKSIZE NCCL_NVB_DISABLE NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE
        NCCL_MNNVL_ENABLE NCCL_MNNVL_UUID NCCL_MNNVL_CLIQUE_ID NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE
        NCCL_WIN_ENABLE NCCL_WIN_STRIDE NCCL_DMABUF_ENABLE NCCL_SET_STACK_SIZE NCCL_SET_THREAD_NAME
        NCCL_CREATE_THREAD_CONTEXT NCCL_WORK_FIFO_DEPTH NCCL_WORK_FIFO_BYTES NCCL_WORK_ARGS_BYTES
        NCCL_PROGRESS_APPENDOP_FREQ NCCL_PROXY_APPEND_BATCH_SIZE NCCL_RUNTIME_CONNECT NCCL_BUFFER_REUSE
        NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_UID_STAGGER_RATE NCCL_UID_STAGGER_THRESHOLD NCCL_RAS_ENABLE
        NCCL_RAS_ADDR NCCL_RAS_TIMEOUT_FACTOR NCCL_SINGLE_RING_THRESHOLD NCCL_SINGLE_PROC_MEM_REG_ENABLE
        NCCL_TREE_THRESHOLD NCCL_LL_THRESHOLD NCCL_TREE_CLUSTER_SIZE NCCL_NVLSTREE_MAX_CHUNKSIZE
        NCCL_PARAM_DUMP_ALL NCCL_PROFILE_EVENT_MASK NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_SYM_KERNEL NCCL_SYM_CTAS
        NCCL_NCHANNELS_PER_NET_PEER NCCL_MAX_P2P_NCHANNELS NCCL_MIN_P2P_NCHANNELS NCCL_LAUNCH_ORDER_IMPLICIT
        NCCL_LAUNCH_RACE_FATAL NCCL_MEM_SYNC_DOMAIN NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD
        TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_DUMP_ON_TIMEOUT
        TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_ENABLE_MONITORING
        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC TORCH_NCCL_COORD_CHECK_MILSEC
        TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_AVOID_RECORD_STREAMS
        TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_NCCL_NAN_CHECK TORCH_NCCL_TRACE_CPP_STACK
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_RETHROW_CUDA_ERRORS
        TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_CUDA_EVENT_CACHE
        TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TORCH_CUDA_ARCH_LIST
        TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_SYMMMEM
    """,
    "infiniband": """
        NCCL_NET_GDR_LEVEL NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX NCCL_IB_ADDR_FAMILY
        NCCL_IB_ADDR_RANGE NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC NCCL_IB_FIFO_TC NCCL_IB_PKEY
        NCCL_IB_CUDA_SUPPORT NCCL_IB_AR_THRESHOLD NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS
        NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ECE_ENABLE NCCL_IB_MERGE_VFS
        NCCL_IB_MERGE_NICS NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_USE_INLINE NCCL_IB_WARN_RAIL_LOCAL
        NCCL_IB_DATA_DIRECT NCCL_IB_OOO_RQ NCCL_NET_GDR_READ NCCL_NET_GDR_C2C NCCL_NET_SHARED_BUFFERS
        NCCL_NET_SHARED_COMMS NCCL_NET_FORCE_MERGE NCCL_NET_MERGE_LEVEL NCCL_NET_DISABLE_INTRA
        NCCL_NET_OPTIONAL_RECV_COMPLETION NCCL_GDR_FLUSH_DISABLE NCCL_GDRCOPY_ENABLE
    """,
}
KNOWN: Mapping[str, Known] = {
    **{known.name: known for known in SPECIAL},
    **{name: Known(name, needs) for needs, names in NAMES.items() for name in names.split()},
}


FREE_CASE = ("NCCL_DEBUG", "GLOO_LOG_LEVEL")  # read in either case
STRICT = ("TORCH_DISTRIBUTED_DEBUG", "GLOO_DEVICE_TRANSPORT")  # another value is an error
ABSENT = "(not set)"


@dataclass(frozen=True)
class Variables:
    """The variables of NCCL, gloo and torch, on one machine.

    values: of the variables that are set. gpus, infiniband: whether this machine has any.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False
    infiniband: bool = False
    nnodes: int = 1


def read_variables(info: LaunchInfo) -> Variables:
    values = {name: os.environ[name] for name in sorted(os.environ) if name.upper().startswith(PREFIXES)}
    has_infiniband = Path("/sys/class/infiniband").is_dir()
    return Variables(values, gpus=nvidia.DRIVER.exists(), infiniband=has_infiniband, nnodes=info.nnodes)


def judge_variables(facts: Mapping[str, Variables]) -> list[Finding]:
    findings = for_each(_judge_machine)(facts)
    names = sorted({name for machine in facts.values() for name in machine.values if name in KNOWN})
    for name in names:
        if name.endswith(("_IFNAME", "_FILE")):
            continue  # interfaces may have other names on each machine
        if values := differences(facts, lambda machine: machine.values.get(name, ABSENT)):  # noqa: B023 - called at once
            value = next(machine.values[name] for machine in facts.values() if name in machine.values)
            why = message("variable_differs_between_machines", name=name, values=values)
            findings += warn(why, f"export {name}={quoted(value)}   # on each")
    return findings


def _judge_machine(facts: Variables) -> list[Finding]:
    findings = [finding for name, value in facts.values.items() for finding in _judge_variable(name, value, facts)]
    return findings or ok(message("no_variable_is_set"))


def _judge_variable(name: str, value: str, facts: Variables) -> list[Finding]:
    known = KNOWN.get(name)
    if known is None:
        return _judge_unknown(name, value)
    plain = value.strip().strip("'\"")
    meaning = known.meaning
    if not value and name.startswith("NCCL_"):
        return ok(message("variable_is_empty", name=name))
    if plain != value:
        return warn(message("variable_has_spaces_or_quotes", name=name, value=value), _export(name, plain))
    if known.instead:
        return warn(
            message("variable_was_renamed", name=name, instead=known.instead), _renamed(name, known.instead, value)
        )
    if known.values and (value.upper() if name in FREE_CASE else value) not in known.values:
        why = message("variable_has_no_such_value", name=name, value=value, values=known.values)
        return (fail if name in STRICT else warn)(why, f"unset {name}")
    if lacking := _lacking(known, facts):
        return ok(message("variable_has_no_effect", name=name, value=value, meaning=meaning, lacking=lacking))
    if value in known.slows and known.cost:
        why = message("variable_slows_training", name=name, value=value, meaning=meaning, cost=known.cost)
        return warn(why, f"unset {quoted(name)}")
    return ok(message("variable_is_set", name=name, value=value, meaning=meaning))


def _lacking(known: Known, facts: Variables) -> Message | None:
    """Returns what is not here that a variable needs to have an effect."""
    if known.needs in ("gpu", "infiniband") and not facts.gpus:
        return message("an_nvidia_gpu")
    if known.needs == "infiniband" and not facts.infiniband:
        return message("infiniband")
    return message("other_machines") if known.needs == "several" and facts.nnodes == 1 else None


def _judge_unknown(name: str, value: str) -> list[Finding]:
    if near := get_close_matches(name.upper(), list(KNOWN), n=1, cutoff=0.85):
        return warn(message("variable_is_misspelt", name=name, near=near[0]), _renamed(name, near[0], value))
    return unknown(message("variable_is_unknown", name=name, value=value))


def _export(name: str, value: str) -> str:
    return f"export {name}={quoted(value)}"


def _renamed(name: str, right: str, value: str) -> str:
    return f"unset {quoted(name)}; {_export(right, value)}"


PROBES = (
    MachineProbe(name="variables", group="variables", facts=Variables, gather=read_variables, judge=judge_variables),
)
