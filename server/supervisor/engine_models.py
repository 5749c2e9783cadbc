"""The models of one engine process: the models to load at each start, and their states.

A model that breaks must not take the others along:

* One that ends the process while it loads is quarantined. After the first such loss the process loads its models one by
  one, so that the next loss names the model.
* One whose forwards end the process repeatedly is quarantined for a while, and then loaded by the running process.
* If the process ends while it loads one model and runs another, either may be at fault. It counts for both, and none
  is quarantined for ever on such evidence.

The only model of a process is never quarantined: there are no other models to protect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from embert.server.ipc.control import ModelInfo, ModelState

LOAD_LOSSES_MAX = 3  # processes lost while they loaded one model
FORWARD_LOSSES_MAX = 4  # processes lost in forwards of one model, less than FORGIVEN_AFTER_S apart
FORGIVEN_AFTER_S = 300.0
QUARANTINE_S, QUARANTINE_MAX_S = 60.0, 3600.0  # the first time, and at most; it doubles with every loss


@dataclass(slots=True)
class _Losses:
    """Processes lost in forwards of a model, or while it was loaded."""

    count: int = 0
    last: float = float("-inf")
    in_doubt: bool = False  # another model may be at fault
    quarantine_s: float = QUARANTINE_S  # duration of the next quarantine

    def next_quarantine_s(self) -> float:
        """Returns the duration of the quarantine that begins now, and doubles the next one."""
        quarantine_s, self.quarantine_s = self.quarantine_s, min(2 * self.quarantine_s, QUARANTINE_MAX_S)
        return quarantine_s


class EngineModels:
    """Models are numbers, as in StartModel. Times are seconds of CLOCK_MONOTONIC."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self.states: Mapping[int, ModelState] = {number: ModelState("loading") for number in self.numbers}
        self._load_losses = {number: _Losses() for number in self.numbers}
        self._losses = {number: _Losses() for number in self.numbers}
        self._quarantined: dict[int, tuple[str, float]] = {}  # number → reason, end of the quarantine
        self._loading: set[int] = set()  # models that this process is loading
        self._one_by_one = False

    def begin(self) -> tuple[list[int], bool]:
        """Begin a start of the process. Returns the models that it loads, and True if it loads them one by one."""
        self._loading.clear()
        wanted = [number for number in self.numbers if number not in self._quarantined]
        self.states = {number: ModelState("failed", why) for number, (why, _) in self._quarantined.items()}
        self.states |= {number: ModelState("loading") for number in wanted}
        # Models that never ended the process come first: the others may end it again.
        return sorted(wanted, key=lambda number: self._load_losses[number].count), self._one_by_one

    def due(self, now: float) -> list[int]:
        """End expired quarantines. Returns the models that the running process loads now."""
        due = [number for number, (_, until) in self._quarantined.items() if until <= now]
        for number in due:
            del self._quarantined[number]
            self.states = {**self.states, number: ModelState("loading")}
        return due

    def loads(self, number: int, doing: str) -> None:
        self._loading.add(number)
        if self.states[number].state == "loading":
            self.states = {**self.states, number: ModelState("loading", doing)}

    def ready(self, number: int, info: ModelInfo) -> None:
        self._end(number, ModelState("ready", "", info))
        self._load_losses[number] = _Losses()

    def failed(self, number: int, message: str) -> None:
        self._end(number, ModelState("failed", message))

    def late(self, message: str) -> list[int]:
        """Returns the models that have been loading for too long. They count as failed until they are ready."""
        late = [number for number, state in self.states.items() if state.state == "loading"]
        for number in late:
            self.states = {**self.states, number: ModelState("failed", message)}
        return late

    def lost(self, exit_detail: str, now: float, running: int | None = None) -> tuple[int, str] | None:
        """Count an end of the process, possibly in a forward of the model `running`.

        `exit_detail` is for example `was killed by SIGKILL`. Returns the model that is quarantined, and the reason.
        """
        blamed, self._loading = self._loading, set()
        self._one_by_one = len(self.numbers) > 1 and bool(blamed or self._one_by_one)
        self.states = {number: ModelState("loading", "starting again") for number in self.numbers}
        if len(self.numbers) == len(self._quarantined) + 1:
            return None
        quarantined = None
        if len(blamed) == 1:
            quarantined = self._lost_in_loading(blamed.pop(), exit_detail, now, in_doubt=running is not None)
        elif blamed:
            return None
        if quarantined is None and running is not None:
            quarantined = self._lost_in_forward(running, exit_detail, now)
        return quarantined

    @property
    def settled(self) -> bool:
        """True if no model is loading any more."""
        return all(state.state != "loading" for state in self.states.values())

    @property
    def all_failed(self) -> bool:
        return all(state.state == "failed" for state in self.states.values())

    def _end(self, number: int, state: ModelState) -> None:
        self._loading.discard(number)
        self.states = {**self.states, number: state}

    def _lost_in_loading(self, number: int, exit_detail: str, now: float, *, in_doubt: bool) -> tuple[int, str] | None:
        losses = self._load_losses[number]
        losses.count, losses.in_doubt = losses.count + 1, losses.in_doubt or in_doubt
        if losses.count < LOAD_LOSSES_MAX:
            return None
        why = f"the engine process {exit_detail} while it loaded this model, {losses.count} times"
        quarantine_s = float("inf")
        if losses.in_doubt:
            quarantine_s = losses.next_quarantine_s()
            why += f", once or more while it ran another one; quarantined for {quarantine_s:.0f} s"
            losses.in_doubt = False
        return self._quarantine(number, why, now + quarantine_s)

    def _lost_in_forward(self, number: int, exit_detail: str, now: float) -> tuple[int, str] | None:
        losses = self._losses[number]
        if now - losses.last > FORGIVEN_AFTER_S + losses.quarantine_s:
            losses.count, losses.quarantine_s = 0, QUARANTINE_S
        losses.count, losses.last = losses.count + 1, now
        if losses.count < FORWARD_LOSSES_MAX:
            return None
        losses.count -= 1  # one more loss after its return is enough
        quarantine_s = losses.next_quarantine_s()
        why = f"the engine process {exit_detail} repeatedly in forwards of this model"
        return self._quarantine(number, f"{why}; quarantined for {quarantine_s:.0f} s", now + quarantine_s)

    def _quarantine(self, number: int, why: str, until: float) -> tuple[int, str]:
        self._quarantined[number] = why, until
        return number, why
