"""The models of one engine process as the supervisor knows them: what each start loads, and their states.

A model that breaks must not take the others along:

* One that ends the process while it loads is quarantined. After the first such loss the process loads its models one by
  one, so that the next loss names the model.
* One whose forwards end the process again and again is quarantined for a while, and then loaded by the running process.
* Where the process ends while it loads one model and runs another, either may be at fault. It counts for both, and none
  is quarantined for ever on such evidence.

The only model of a process is never quarantined: there is nobody to protect from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from embert.server.ipc.control import ModelInfo, ModelState

__all__ = ["EngineModels"]

LOAD_LOSSES_MAX = 3  # processes lost while they loaded one model
FORWARD_LOSSES_MAX = 4  # processes lost in forwards of one model, with less than FORGIVEN_AFTER_S between two of them
FORGIVEN_AFTER_S = 300.0
QUARANTINE_S, LEFT_OUT_MAX_S = 60.0, 3600.0  # the first time, and at most; it doubles with every loss


@dataclass(slots=True)
class _Losses:
    """Processes lost in forwards of a model, or while it was loaded."""

    count: int = 0
    last: float = float("-inf")
    in_doubt: bool = False  # another model may be at fault
    quarantine_s: float = QUARANTINE_S  # for how long the model is quarantined the next time

    def leave_out_s(self) -> float:
        """For how long the model is quarantined now."""
        quarantine_s, self.quarantine_s = self.quarantine_s, min(2 * self.quarantine_s, LEFT_OUT_MAX_S)
        return quarantine_s


class EngineModels:
    """Models are numbers, as in StartModel. Moments are seconds of CLOCK_MONOTONIC."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self.states: Mapping[int, ModelState] = {number: ModelState("loading") for number in self.numbers}
        self._load_losses = {number: _Losses() for number in self.numbers}
        self._losses = {number: _Losses() for number in self.numbers}
        self._left_out: dict[int, tuple[str, float]] = {}  # with the reason, and until when
        self._loading: set[int] = set()  # what this start has begun and not ended
        self._one_by_one = False

    def begin(self) -> tuple[list[int], bool]:
        """A start of the process: the models that it is to load, and whether one by one."""
        self._loading.clear()
        wanted = [number for number in self.numbers if number not in self._left_out]
        self.states = {number: ModelState("failed", why) for number, (why, _) in self._left_out.items()}
        self.states |= {number: ModelState("loading") for number in wanted}
        # What was never at fault comes first: it must not wait for what may end the process again.
        return sorted(wanted, key=lambda number: self._load_losses[number].count), self._one_by_one

    def due(self, now: float) -> list[int]:
        """The models that have been quarantined for long enough: the running process is to load them."""
        due = [number for number, (_, until) in self._left_out.items() if until <= now]
        for number in due:
            del self._left_out[number]
            self.states = {**self.states, number: ModelState("loading")}
        return due

    def loads(self, number: int) -> None:
        """The process has begun with a model."""
        self._loading.add(number)

    def ready(self, number: int, info: ModelInfo) -> None:
        """A model works."""
        self._end(number, ModelState("ready", "", info))
        self._load_losses[number] = _Losses()

    def failed(self, number: int, message: str) -> None:
        """A model cannot be loaded."""
        self._end(number, ModelState("failed", message))

    def late(self, message: str) -> list[int]:
        """The models that still load, after too long; they count as failed until they are ready."""
        late = [number for number, state in self.states.items() if state.state == "loading"]
        for number in late:
            self.states = {**self.states, number: ModelState("failed", message)}
        return late

    def lost(self, how: str, now: float, running: int | None = None) -> tuple[int, str] | None:
        """The process has ended, `was killed by SIGKILL` say, perhaps in a forward of the model `running`.

        Returns a model that is quarantined for it, and why.
        """
        blamed, self._loading = self._loading, set()
        self._one_by_one = len(self.numbers) > 1 and bool(blamed or self._one_by_one)
        self.states = {number: ModelState("loading", "starting again") for number in self.numbers}
        if len(self.numbers) == len(self._left_out) + 1:
            return None
        quarantined = None
        if len(blamed) == 1:
            quarantined = self._lost_in_loading(blamed.pop(), how, now, in_doubt=running is not None)
        elif blamed:
            return None
        if quarantined is None and running is not None:
            quarantined = self._lost_in_forward(running, how, now)
        return quarantined

    @property
    def settled(self) -> bool:
        """Whether no model is loading any more."""
        return all(state.state != "loading" for state in self.states.values())

    @property
    def hopeless(self) -> bool:
        """Whether every model has failed."""
        return all(state.state == "failed" for state in self.states.values())

    def _end(self, number: int, state: ModelState) -> None:
        self._loading.discard(number)
        self.states = {**self.states, number: state}

    def _lost_in_loading(self, number: int, how: str, now: float, *, in_doubt: bool) -> tuple[int, str] | None:
        losses = self._load_losses[number]
        losses.count, losses.in_doubt = losses.count + 1, losses.in_doubt or in_doubt
        if losses.count < LOAD_LOSSES_MAX:
            return None
        why = f"the engine process {how} while it loaded this model, {losses.count} times"
        quarantine_s = float("inf")
        if losses.in_doubt:
            quarantine_s = losses.leave_out_s()
            why += f", once or more while it ran another one; quarantined for {quarantine_s:.0f} s"
            losses.in_doubt = False
        return self._leave_out(number, why, now + quarantine_s)

    def _lost_in_forward(self, number: int, how: str, now: float) -> tuple[int, str] | None:
        losses = self._losses[number]
        if now - losses.last > FORGIVEN_AFTER_S + losses.quarantine_s:
            losses.count, losses.quarantine_s = 0, QUARANTINE_S
        losses.count, losses.last = losses.count + 1, now
        if losses.count < FORWARD_LOSSES_MAX:
            return None
        losses.count -= 1  # one more loss after its return is enough
        quarantine_s = losses.leave_out_s()
        why = (
            f"the engine process {how} in forwards of this model, again and again; quarantined for {quarantine_s:.0f} s"
        )
        return self._leave_out(number, why, now + quarantine_s)

    def _leave_out(self, number: int, why: str, until: float) -> tuple[int, str]:
        self._left_out[number] = why, until
        return number, why
