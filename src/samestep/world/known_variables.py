"""What the environment variables NCCL_*, GLOO_* and TORCH_* mean, and where each has an effect.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html,
https://docs.pytorch.org/docs/stable/distributed.html, and torch's own source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Needs = Literal["", "gpu", "infiniband", "several"]


@dataclass(frozen=True)
class Known:
    """An environment variable that NCCL, gloo or torch reads.

    meaning: what it does. needs: where it has an effect; '': everywhere. values: those that it takes; none: any. slows:
    the values that cost speed, with why. instead: the name that has replaced it.
    """

    meaning: str
    needs: Needs = ""
    values: tuple[str, ...] = ()
    slows: tuple[str, ...] = ()
    why: str = ""
    instead: str = ""


SWITCH = ("0", "1")
DISABLED = ("1",)


def _of(needs: Needs, **meanings: str) -> dict[str, Known]:
    return {name: Known(meaning, needs) for name, meaning in meanings.items()}


GLOO = {
    "GLOO_SOCKET_IFNAME": Known("the interface, or several separated by commas, on which gloo communicates"),
    "GLOO_DEVICE_TRANSPORT": Known("gloo's transport", values=("TCP", "TCP_TLS", "UV", "IBVERBS")),
    **_of(
        "",
        GLOO_LOG_LEVEL="what gloo prints: TRACE, DEBUG, INFO, WARN or ERROR",
        GLOO_DISABLE_CONNECTION_RETRIES="1: a connection that fails is not tried again",
        GLOO_ENABLE_STORE_V2_API="1: gloo reads several keys of the store at once",
        GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER="1: gloo numbers its connections by rank",
        GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY="the private key of the transport TCP_TLS",
        GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT="the certificate of the transport TCP_TLS",
        GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE="the authority's certificate of the transport TCP_TLS",
        GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH="the folder of the authorities' certificates of the transport TCP_TLS",
    ),
}

NCCL = {
    "NCCL_SOCKET_IFNAME": Known("the interfaces of NCCL, by prefix; =NAME: exactly; ^NAME: not", "gpu"),
    "NCCL_DEBUG": Known("what NCCL prints", "gpu", ("VERSION", "WARN", "INFO", "ABORT", "TRACE")),
    "NCCL_IB_DISABLE": Known(
        "1: NCCL uses sockets instead of InfiniBand", "infiniband", SWITCH, DISABLED, "InfiniBand is here, and not used"
    ),
    "NCCL_P2P_DISABLE": Known(
        "1: GPUs of a machine exchange data through host memory",
        "gpu",
        SWITCH,
        DISABLED,
        "NVLink and PCIe are not used",
    ),
    "NCCL_SHM_DISABLE": Known(
        "1: no shared memory between the ranks of a machine", "gpu", SWITCH, DISABLED, "they use the network instead"
    ),
    "NCCL_NET_GDR_LEVEL": Known("how far a network card may be from a GPU to read its memory", "infiniband"),
    "NCCL_P2P_LEVEL": Known("how far GPUs may be from each other to exchange data directly", "gpu"),
    "NCCL_BLOCKING_WAIT": Known("the older name", "gpu", instead="TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_ASYNC_ERROR_HANDLING": Known("the older name", "gpu", instead="TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_DESYNC_DEBUG": Known("the older name", "gpu", instead="TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_LAUNCH_MODE": Known("how kernels are launched: PARALLEL or GROUP", "gpu"),
    **_of(
        "gpu",
        NCCL_DEBUG_SUBSYS="of which parts NCCL_DEBUG=INFO prints",
        NCCL_DEBUG_FILE="the file of NCCL_DEBUG's output; %h: the host, %p: the process",
        NCCL_DEBUG_TIMESTAMP_FORMAT="the times in NCCL_DEBUG's output",
        NCCL_DEBUG_TIMESTAMP_LEVELS="which lines of NCCL_DEBUG have a time",
        NCCL_SOCKET_FAMILY="AF_INET or AF_INET6: IPv4 or IPv6 alone",
        NCCL_SOCKET_RETRY_CNT="how often a connection is tried again",
        NCCL_SOCKET_RETRY_SLEEP_MSEC="the pause between two tries",
        NCCL_SOCKET_NTHREADS="threads of each connection",
        NCCL_NSOCKS_PERTHREAD="sockets of each of these threads",
        NCCL_CROSS_NIC="1: a ring may use other cards on each machine",
        NCCL_NET="the network: IB, Socket, or a plugin's",
        NCCL_NET_PLUGIN="the library of a network plugin",
        NCCL_TUNER_PLUGIN="the library of a tuner plugin",
        NCCL_PROFILER_PLUGIN="the library of a profiler plugin",
        NCCL_ENV_PLUGIN="the library of a plugin for variables",
        NCCL_CONF_FILE="the file with values for these variables",
        NCCL_ALGO="the algorithms that may be chosen: Ring, Tree, …",
        NCCL_PROTO="the protocols that may be chosen: LL, LL128, Simple",
        NCCL_NTHREADS="CUDA threads of a block",
        NCCL_LL128_NTHREADS="CUDA threads of a block, for the protocol LL128",
        NCCL_THREAD_THRESHOLDS="sizes from which more threads are used",
        NCCL_BUFFSIZE="bytes of a buffer between two GPUs",
        NCCL_LL_BUFFSIZE="bytes of a buffer of the protocol LL",
        NCCL_LL128_BUFFSIZE="bytes of a buffer of the protocol LL128",
        NCCL_P2P_NET_CHUNKSIZE="bytes of a message of send and receive",
        NCCL_MIN_NCHANNELS="the fewest channels",
        NCCL_MAX_NCHANNELS="the most channels",
        NCCL_MIN_NRINGS="the fewest rings (older)",
        NCCL_MAX_NRINGS="the most rings (older)",
        NCCL_RINGS="the rings, as lists of GPUs (older)",
        NCCL_MIN_CTAS="the fewest CUDA blocks",
        NCCL_MAX_CTAS="the most CUDA blocks",
        NCCL_CGA_CLUSTER_SIZE="the size of CUDA clusters",
        NCCL_CTA_POLICY="how CUDA blocks are chosen",
        NCCL_CHECKS_DISABLE="1: arguments are not checked (older)",
        NCCL_CHECK_POINTERS="1: pointers of arguments are checked",
        NCCL_COMM_BLOCKING="0: calls return at once",
        NCCL_COMM_ID="HOST:PORT of the first rank, without a store",
        NCCL_HOSTID="the name that distinguishes machines",
        NCCL_IGNORE_CPU_AFFINITY="1: threads are placed by the GPU alone",
        NCCL_TOPO_FILE="the file that describes the machine",
        NCCL_TOPO_DUMP_FILE="the file to which the machine is described",
        NCCL_GRAPH_FILE="the file with the rings and trees",
        NCCL_GRAPH_DUMP_FILE="the file to which rings and trees are written",
        NCCL_GRAPH_REGISTER="1: buffers in CUDA graphs are registered",
        NCCL_GRAPH_MIXING_SUPPORT="0: no other calls beside CUDA graphs",
        NCCL_LOCAL_REGISTER="1: buffers are registered where the user asks",
        NCCL_LEGACY_CUDA_REGISTER="1: buffers of cudaMalloc are registered",
        NCCL_SHM_USE_CUDA_MEMCPY="1: copies through shared memory use the copy engine",
        NCCL_SHM_MEMCPY_MODE="which side copies",
        NCCL_SHM_LOCALITY="on which side the shared memory lies",
        NCCL_P2P_DIRECT_DISABLE="1: no direct access inside one process",
        NCCL_P2P_USE_CUDA_MEMCPY="1: copies between GPUs use the copy engine",
        NCCL_P2P_PXN_LEVEL="whether a message may go through another GPU's card",
        NCCL_PXN_DISABLE="1: a message never goes through another GPU's card",
        NCCL_PXN_C2C="1: cards are reached over C2C",
        NCCL_P2P_PCI_RELAXED_ORDERING="1: PCI transfers may overtake each other",
        NCCL_NVLS_ENABLE="whether NVLink SHARP is used",
        NCCL_NVLS_CHUNKSIZE="bytes of a message of NVLink SHARP",
        NCCL_NVB_DISABLE="1: no path over another GPU's NVLink",
        NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE="1: scheduling by NVLink's use",
        NCCL_MNNVL_ENABLE="whether NVLink over several machines is used",
        NCCL_MNNVL_UUID="the id of NVLink's domain",
        NCCL_MNNVL_CLIQUE_ID="the id of a part of NVLink's domain",
        NCCL_CUMEM_ENABLE="whether memory is taken by CUDA's cuMem calls",
        NCCL_CUMEM_HOST_ENABLE="whether host memory is taken by cuMem calls",
        NCCL_WIN_ENABLE="whether memory windows are used",
        NCCL_WIN_STRIDE="the stride of memory windows",
        NCCL_DMABUF_ENABLE="1: network cards read GPU memory through dma-buf",
        NCCL_SET_STACK_SIZE="1: CUDA's stack is set to what the kernels need",
        NCCL_SET_THREAD_NAME="1: NCCL's threads have names",
        NCCL_CREATE_THREAD_CONTEXT="1: NCCL's threads have a CUDA context",
        NCCL_WORK_FIFO_DEPTH="how many operations may wait",
        NCCL_WORK_FIFO_BYTES="bytes of the operations that wait",
        NCCL_WORK_ARGS_BYTES="bytes of a kernel's arguments",
        NCCL_PROGRESS_APPENDOP_FREQ="how often new operations are looked for",
        NCCL_PROXY_APPEND_BATCH_SIZE="how many operations the proxy takes at once",
        NCCL_RUNTIME_CONNECT="0: connections are opened when the group is made",
        NCCL_BUFFER_REUSE="whether buffers are used again",
        NCCL_OOB_NET_ENABLE="1: ranks meet over the network plugin",
        NCCL_OOB_NET_IFNAME="the interface on which they meet then",
        NCCL_UID_STAGGER_RATE="how many ranks meet in a second",
        NCCL_UID_STAGGER_THRESHOLD="from how many ranks on they meet one after the other",
        NCCL_RAS_ENABLE="0: no thread that answers ncclras",
        NCCL_RAS_ADDR="where ncclras is answered",
        NCCL_RAS_TIMEOUT_FACTOR="how patient that thread is",
        NCCL_SINGLE_RING_THRESHOLD="the size up to which one ring is used (older)",
        NCCL_SINGLE_PROC_MEM_REG_ENABLE="1: memory is registered in one process",
        NCCL_TREE_THRESHOLD="the size up to which trees are used (older)",
        NCCL_LL_THRESHOLD="the size up to which LL is used (older)",
        NCCL_TREE_CLUSTER_SIZE="the size of a part of a tree",
        NCCL_NVLSTREE_MAX_CHUNKSIZE="bytes of a message of NVLSTree",
        NCCL_PARAM_DUMP_ALL="1: all variables are printed",
        NCCL_PROFILE_EVENT_MASK="which events the profiler records",
        NCCL_ALLOC_P2P_NET_LL_BUFFERS="1: buffers for LL between machines are kept ready",
        NCCL_SYM_KERNEL="which kernel for symmetric memory is used",
        NCCL_SYM_CTAS="CUDA blocks of that kernel",
        NCCL_NCHANNELS_PER_NET_PEER="channels between two machines",
        NCCL_MAX_P2P_NCHANNELS="the most channels of send and receive",
        NCCL_MIN_P2P_NCHANNELS="the fewest channels of send and receive",
        NCCL_LAUNCH_ORDER_IMPLICIT="1: operations of several communicators run in the order of their launches",
        NCCL_LAUNCH_RACE_FATAL="1: a race between launches ends the process",
        NCCL_MEM_SYNC_DOMAIN="the domain of NCCL's memory fences",
        NCCL_COLLNET_ENABLE="1: the network may reduce (SHARP)",
        NCCL_COLLNET_NODE_THRESHOLD="from how many machines on it does",
    ),
    **_of(
        "infiniband",
        NCCL_IB_HCA="the InfiniBand adapters, by prefix; =NAME: exactly; ^NAME: not",
        NCCL_IB_TIMEOUT="how long a message may stay without an answer: 4.096 µs × 2^value",
        NCCL_IB_RETRY_CNT="how often a message is sent again",
        NCCL_IB_GID_INDEX="the index of the RoCE address",
        NCCL_IB_ADDR_FAMILY="AF_INET or AF_INET6, of the RoCE address",
        NCCL_IB_ADDR_RANGE="the range of the RoCE address",
        NCCL_IB_ROCE_VERSION_NUM="the version of RoCE",
        NCCL_IB_SL="the service level",
        NCCL_IB_TC="the traffic class",
        NCCL_IB_FIFO_TC="the traffic class of control messages",
        NCCL_IB_PKEY="the index of the partition",
        NCCL_IB_CUDA_SUPPORT="whether adapters read GPU memory (older)",
        NCCL_IB_AR_THRESHOLD="the size from which messages are routed adaptively",
        NCCL_IB_QPS_PER_CONNECTION="queue pairs of a connection",
        NCCL_IB_SPLIT_DATA_ON_QPS="whether data is split over them",
        NCCL_IB_PCI_RELAXED_ORDERING="whether PCI transfers may overtake each other",
        NCCL_IB_ADAPTIVE_ROUTING="whether messages are routed adaptively",
        NCCL_IB_ECE_ENABLE="whether connections are enhanced",
        NCCL_IB_MERGE_VFS="1: virtual functions of a card are one",
        NCCL_IB_MERGE_NICS="1: the ports of a card are one",
        NCCL_IB_RETURN_ASYNC_EVENTS="1: an adapter's error ends the operation",
        NCCL_IB_USE_INLINE="1: small messages travel inside the request",
        NCCL_IB_WARN_RAIL_LOCAL="1: a warning where cards are not on one rail",
        NCCL_IB_DATA_DIRECT="whether adapters read GPU memory past the processor",
        NCCL_IB_OOO_RQ="1: answers may come in another order",
        NCCL_NET_GDR_READ="1: cards read GPU memory when they send, too",
        NCCL_NET_GDR_C2C="1: cards read GPU memory over C2C",
        NCCL_NET_SHARED_BUFFERS="1: connections share buffers",
        NCCL_NET_SHARED_COMMS="1: connections are shared",
        NCCL_NET_FORCE_MERGE="which cards are one",
        NCCL_NET_MERGE_LEVEL="how far cards may be apart to be one",
        NCCL_NET_DISABLE_INTRA="1: no network inside one machine",
        NCCL_NET_OPTIONAL_RECV_COMPLETION="1: receipts may be left out",
        NCCL_GDR_FLUSH_DISABLE="1: no flush after a card has written into a GPU",
        NCCL_GDRCOPY_ENABLE="1: GDRCopy is used",
    ),
}

_DETAIL = "every collective is checked on all ranks first"
TORCH = {
    "TORCH_DISTRIBUTED_DEBUG": Known("checks of collectives", "", ("OFF", "INFO", "DETAIL"), ("DETAIL",), _DETAIL),
    "TORCH_NCCL_BLOCKING_WAIT": Known("1: a collective blocks until it has ended", "gpu", SWITCH, ("1",), "it blocks"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Known("what happens after an error of NCCL", "gpu", ("0", "1", "2", "3")),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Known("the older name", instead="TORCH_FR_BUFFER_SIZE"),
    "TORCH_CPP_LOG_LEVEL": Known("what torch's C++ prints", values=("INFO", "WARNING", "ERROR", "FATAL")),
    **_of(
        "gpu",
        TORCH_NCCL_USE_COMM_NONBLOCKING="1: communicators are made in the background",
        TORCH_NCCL_HIGH_PRIORITY="1: collectives run on streams of high priority",
        TORCH_NCCL_DUMP_ON_TIMEOUT="1: the flight recorder is written when a collective takes too long",
        TORCH_NCCL_DESYNC_DEBUG="1: names the ranks that hang",
        TORCH_NCCL_ENABLE_TIMING="1: collectives are timed",
        TORCH_NCCL_ENABLE_MONITORING="1: a thread ends a process whose watchdog hangs",
        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="how long that thread waits",
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="how long it waits for the flight recorder",
        TORCH_NCCL_COORD_CHECK_MILSEC="how often ranks look for another's time-out",
        TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN="1: prints the C++ stack when a process does not end well",
        TORCH_NCCL_AVOID_RECORD_STREAMS="1: buffers are kept alive another way",
        TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1: torch's memory is registered with NCCL",
        TORCH_NCCL_NAN_CHECK="1: inputs are searched for NaN",
        TORCH_NCCL_TRACE_CPP_STACK="1: the flight recorder has C++ stacks",
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE="where the flight recorder is written",
        TORCH_NCCL_DEBUG_INFO_PIPE_FILE="the pipe that asks for it",
        TORCH_NCCL_RETHROW_CUDA_ERRORS="0: CUDA's errors do not end the process",
        TORCH_NCCL_PROPAGATE_ERROR="1: a rank's error reaches the others",
        TORCH_NCCL_CUDA_EVENT_CACHE="0: CUDA events are not used again",
        TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="0: one warning less",
        TORCH_CUDA_ARCH_LIST="the GPUs that extensions are built for",
        TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1: float32 products may use TF32",
        TORCH_SYMMMEM="the implementation of symmetric memory",
    ),
    **_of(
        "",
        TORCH_GLOO_LAZY_INIT="1: gloo connects ranks when they first communicate",
        TORCH_FR_BUFFER_SIZE="how many collectives the flight recorder keeps",
        TORCH_FR_DUMP_TEMP_FILE="where the flight recorder is written",
        TORCH_FR_DUMP_DYNAMIC_FILE_NAME="whether that name is made anew",
        TORCH_FR_CPP_STACK="1: the flight recorder has C++ stacks",
        TORCH_SHOW_CPP_STACKTRACES="1: errors show the C++ stack",
        TORCH_DISABLE_ADDR2LINE="1: C++ stacks without line numbers",
        TORCH_LOGS="what torch.compile prints",
        TORCH_TRACE="the folder of torch.compile's trace",
        TORCH_COMPILE_DISABLE="1: torch.compile does nothing",
        TORCH_COMPILE_DEBUG="1: torch.compile writes what it made",
        TORCH_COMPILE_BACKEND="the back end of torch.compile",
        TORCH_DIST_INIT_BARRIER="1: a barrier ends init_process_group",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1: torchrun's ranks open a store of their own",
        TORCH_ELASTIC_WORKER_IDENTICAL="1: torchrun's workers are alike",
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="how long torchrun waits for its workers' end",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1: another implementation of the collectives",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0: no device of another package is loaded",
        TORCH_EXTENSIONS_DIR="where C++ extensions are built",
        TORCH_HOME="where torch keeps downloads",
        TORCH_HUB="where torch.hub keeps downloads",
        TORCH_FORCE_WEIGHTS_ONLY_LOAD="1: torch.load never unpickles code",
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1: torch.load unpickles code: only for files that you trust",
        TORCH_USE_RTLD_GLOBAL="1: torch's libraries share their symbols",
        TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT="how long a process waits for autograd's threads",
    ),
}

KNOWN: dict[str, Known] = {**GLOO, **NCCL, **TORCH}
PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
