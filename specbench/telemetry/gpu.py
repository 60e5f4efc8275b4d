"""NVIDIA GPUs as NVML tells of them. The only module that knows NVML's names.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html; the Python names are those
of nvidia-ml-py, the extra `specbench[gpu]`. What a GPU does not support reads None.
"""

from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Self

INSTALL = "nvidia-ml-py is not installed: pip install 'specbench[gpu]'"
PROCESSES_EVERY = 10  # readings between two looks at who is on the GPU

Reading = dict[str, Any]


class Gpus:
    """The GPUs that a run may use; a reading of each takes some milliseconds."""

    def __init__(self, nvml: Any, visible: str | None = None) -> None:  # noqa: ANN401
        """*visible* is a CUDA_VISIBLE_DEVICES: indices or starts of UUIDs; None for all."""
        self._nvml = nvml
        self._unsupported: set[tuple[int, str]] = set()
        self._readings = 0
        self._ours: dict[int, bool | None] = {}
        found = {i: nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())}
        names = None if visible is None else [n for n in map(str.strip, visible.split(",")) if n]
        self._handles = {
            i: handle
            for i, handle in found.items()
            if names is None
            or str(i) in names
            or any(_text(nvml.nvmlDeviceGetUUID(handle)).startswith(n) for n in names)
        }

    @classmethod
    def open(cls, visible: str | None = None) -> tuple[Self | None, str | None]:
        """The GPUs, or None with the reason in words where there is one to tell."""
        try:
            import pynvml
        except ImportError:
            return None, INSTALL
        return cls.of(pynvml, visible)

    @classmethod
    def of(cls, nvml: ModuleType, visible: str | None) -> tuple[Self | None, str | None]:
        """As `open`, by this module."""
        try:
            nvml.nvmlInit()
            gpus = cls(nvml, visible)
        except nvml.NVMLError as error:
            return None, f"NVML: {error}"
        return (gpus, None) if gpus._handles else (None, "no GPU is visible to engines")

    def facts(self) -> list[Reading]:
        """What does not change: name, driver and limits, a GPU each."""
        nvml = self._nvml
        driver = self._ask(-1, "nvmlSystemGetDriverVersion")
        return [
            {
                "index": i,
                "name": _text(self._ask(i, "nvmlDeviceGetName", handle)),
                "uuid": _text(self._ask(i, "nvmlDeviceGetUUID", handle)),
                "driver": _text(driver),
                "power_limit_w": _scaled(
                    self._ask(i, "nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3
                ),
                "max_sm_mhz": self._ask(i, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
                "memory_bytes": self._memory(i, handle, "total"),
            }
            for i, handle in self._handles.items()
        ]

    def read(
        self, our_pids: Callable[[], Collection[int]], clock: Callable[[], int]
    ) -> list[Reading]:
        """Each GPU now; `at_ns` is by *clock*, at its power and energy.

        `ours` says whether one of *our_pids* computes there: None where NVML names no process,
        as in a container with process ids of its own.
        """
        if self._readings % PROCESSES_EVERY == 0:
            pids = set(our_pids())
            self._ours = {i: self._is_ours(i, handle, pids) for i, handle in self._handles.items()}
        self._readings += 1
        return [self._reading(i, handle, clock) for i, handle in self._handles.items()]

    def _reading(self, i: int, handle: object, clock: Callable[[], int]) -> Reading:
        nvml = self._nvml
        began = clock()
        energy = self._ask(i, "nvmlDeviceGetTotalEnergyConsumption", handle)  # mJ, Volta and later
        power = self._ask(i, "nvmlDeviceGetPowerUsage", handle)  # mW
        ended = clock()
        use = self._ask(i, "nvmlDeviceGetUtilizationRates", handle)
        slowed = self._ask(i, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if slowed is None:  # its name until driver 535
            slowed = self._ask(i, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return {
            "index": i,
            "at_ns": (began + ended) // 2,
            "energy_j": _scaled(energy, 1e-3),
            "power_w": _scaled(power, 1e-3),
            "sm_mhz": self._ask(i, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask(i, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask(
                i, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "slowed_by": slowed,
            "memory_bytes": self._memory(i, handle, "used"),
            "busy": _scaled(use.gpu if use is not None else None, 0.01),
            "ours": self._ours.get(i),
        }

    def _memory(self, i: int, handle: object, what: str) -> int | None:
        memory = self._ask(i, "nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else int(getattr(memory, what))

    def _is_ours(self, i: int, handle: object, pids: set[int]) -> bool | None:
        processes = self._ask(i, "nvmlDeviceGetComputeRunningProcesses", handle)
        return any(one.pid in pids for one in processes) if processes else None

    def _ask(self, i: int, name: str, *arguments: object) -> Any:  # noqa: ANN401
        """What NVML answers; None where this GPU, driver or nvidia-ml-py can't, for good."""
        key = (i, name)
        if key in self._unsupported:
            return None
        nvml = self._nvml
        try:
            return getattr(nvml, name)(*arguments)
        except AttributeError:
            self._unsupported.add(key)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(key)
        return None


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else round(value * by, 3)


def _text(value: Any) -> str:  # noqa: ANN401
    """nvidia-ml-py gave bytes until version 11.515."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
