"""Metrics of the engine's GPU from the driver's NVML, through ctypes: four numbers do not justify a package.

CUDA and NVML number devices differently (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER), so a device is looked up by its PCI
address: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
import logging
import time

from embert.server.observability.metrics import gpu_gauge

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
_NVML, _DRIVER = "libnvidia-ml.so.1", "libcuda.so.1"
_PCI_ADDRESS_BYTES = 32


class GpuUnknown(Exception):
    """NVML cannot report on the device; the message names the library or the call."""


class _Memory(ctypes.Structure):  # nvmlMemory_v2_t; version 1 counts memory that the driver reserves as used
    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


_MEMORY_VERSION = ctypes.sizeof(_Memory) | 2 << 24  # NVML_STRUCT_VERSION(Memory, 2)


class _Utilization(ctypes.Structure):  # nvmlUtilization_t
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Gpu:
    """One device, under its CUDA name: `cuda:0`."""

    def __init__(self, device: str) -> None:
        """Raises GpuUnknown if the driver's libraries are missing or do not know the device."""
        address = _pci_address(int(device.partition(":")[2] or 0))
        self._nvml = _library(_NVML)
        _check(self._nvml.nvmlInit_v2(), "nvmlInit")
        self._handle = ctypes.c_void_p()
        status = self._nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(self._handle))
        _check(status, "nvmlDeviceGetHandleByPciBusId")

    def read(self) -> dict[str, float]:
        """Returns the present values that this GPU reports, by name in GPU_METRICS."""
        memory, utilization, milliwatts = _Memory(_MEMORY_VERSION), _Utilization(), ctypes.c_uint()
        values: dict[str, float] = {}
        if self._get("nvmlDeviceGetMemoryInfo_v2", memory):
            values |= {"memory_bytes": memory.used, "memory_limit_bytes": memory.total}  # used by every process
        if self._get("nvmlDeviceGetUtilizationRates", utilization):
            # Share of the driver's last sample in which a kernel ran.
            values["utilization_ratio"] = utilization.gpu / 100
        if self._get("nvmlDeviceGetPowerUsage", milliwatts):
            values["power_watts"] = milliwatts.value / 1e3
        return values

    def _get(self, function: str, result: ctypes.Structure | ctypes.c_uint) -> bool:
        return bool(getattr(self._nvml, function)(self._handle, ctypes.byref(result)) == 0)


def report_gpu(device: str) -> None:
    """Update the gauges of `device` for ever, in a daemon thread. Returns at once if NVML is not available."""
    try:
        gpu = Gpu(device)
    except GpuUnknown as error:
        log.info("no metrics of %s: %s", device, error)
        return
    values = gpu.read()
    gauges = {name: gpu_gauge(name, device) for name in values}
    while True:
        for name in gauges.keys() & values.keys():
            gauges[name].set(values[name])
        time.sleep(REPORT_INTERVAL_S)
        values = gpu.read()


def _pci_address(index: int) -> ctypes.Array[ctypes.c_char]:
    driver = _library(_DRIVER)
    _check(driver.cuInit(0), "cuInit")
    device = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), index), f"cuDeviceGet({index})")
    address = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    _check(driver.cuDeviceGetPCIBusId(address, _PCI_ADDRESS_BYTES, device), "cuDeviceGetPCIBusId")
    return address


def _library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise GpuUnknown(f"{name} cannot be loaded: {error}") from None


def _check(status: int, function: str) -> None:
    if status != 0:
        raise GpuUnknown(f"{function} failed with status {status}")
