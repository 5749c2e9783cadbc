"""The dashboard's rows about GPUs: embert reports its own GPU, NVIDIA's DCGM exporter reports all."""

from __future__ import annotations

from collections.abc import Iterator

from panels import DCGM, SELECT, Panel, lines, target


def gpu() -> Iterator[Panel]:
    """GPU (empty without one)"""
    each = "{{instance}} {{device}}"
    yield lines(
        "GPU memory",
        "Used by all processes on the GPU, and its size. embert allocates at start; growth is another process.",
        [
            target(f"embert_gpu_memory_bytes{{{SELECT}}}", each),
            target(f"embert_gpu_memory_limit_bytes{{{SELECT}}}", f"limit of {each}"),
        ],
        "bytes",
    )
    yield lines(
        "GPU running",
        "Share of the driver's sample in which the GPU ran anything. Low with a full queue: the host is the limit.",
        [target(f"embert_gpu_utilization_ratio{{{SELECT}}}", each)],
        "percentunit",
        highest=1,
    )
    yield lines(
        "GPU power",
        "Watts drawn. A drop at unchanged load means that the GPU was throttled.",
        [target(f"embert_gpu_power_watts{{{SELECT}}}", each)],
        "watt",
    )


def dcgm() -> Iterator[Panel]:
    """GPU (DCGM)"""
    each = "{{Hostname}} GPU {{gpu}} {{exported_pod}}"
    yield lines(
        "GPU activity (DCGM)",
        "Shares of the time in which its tensor cores, its memory and anything of it were at work. Tensor cores are "
        "busy with long batches, memory with short ones; neither, and the GPU waits for the host.",
        [
            target(f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{DCGM}}}", f"tensor cores {each}"),
            target(f"DCGM_FI_PROF_DRAM_ACTIVE{{{DCGM}}}", f"memory {each}"),
            target(f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{DCGM}}}", f"anything {each}"),
        ],
        "percentunit",
        highest=1,
    )
    yield lines(
        "GPU running (DCGM)",
        'As "GPU running" above, of every GPU of the hosts, whoever uses it.',
        [target(f"DCGM_FI_DEV_GPU_UTIL{{{DCGM}}} / 100", each)],
        "percentunit",
        highest=1,
    )
    yield lines(
        "GPU memory (DCGM)",
        "Used, and used and free together. Includes other processes on the GPU.",
        [
            target(f"DCGM_FI_DEV_FB_USED{{{DCGM}}} * 1048576", each),
            target(f"(DCGM_FI_DEV_FB_USED{{{DCGM}}} + DCGM_FI_DEV_FB_FREE{{{DCGM}}}) * 1048576", f"limit of {each}"),
        ],
        "bytes",
    )
    yield lines(
        "SM clock (DCGM)",
        "A clock that falls under load is throttled: see power and temperature next to it.",
        [target(f"DCGM_FI_DEV_SM_CLOCK{{{DCGM}}} * 1e6", each)],
        "hertz",
        width=6,
    )
    yield lines(
        "GPU power (DCGM)",
        "Watts drawn. At the GPU's limit its clock falls.",
        [target(f"DCGM_FI_DEV_POWER_USAGE{{{DCGM}}}", each)],
        "watt",
        width=6,
    )
    yield lines(
        "GPU temperature (DCGM)",
        "From about 85 °C on the clock falls: look at the host's cooling.",
        [target(f"DCGM_FI_DEV_GPU_TEMP{{{DCGM}}}", each)],
        "celsius",
        width=6,
    )
    yield lines(
        "Last XID error (DCGM)",
        "The driver's number of the last error, 0 without any. NVIDIA's list of XIDs says what it means; 79: GPU lost.",
        [target(f"DCGM_FI_DEV_XID_ERRORS{{{DCGM}}}", each)],
        "none",
        width=6,
    )
