"""The models of one engine process as the supervisor knows them: what each start loads, and their states.

A model that ends the process while it loads must not take the others along. After such a loss the process loads its
models one by one, so that the next loss names the model; after LOSSES_MAX of them it is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from embert.server.ipc.control import ModelInfo, ModelState

__all__ = ["EngineModels"]

LOSSES_MAX = 3  # processes lost while they loaded one model


class EngineModels:
    """Models are numbers, as in StartModel."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self.states: Mapping[int, ModelState] = {number: ModelState("loading") for number in self.numbers}
        self._losses: Counter[int] = Counter()
        self._left_out: dict[int, str] = {}  # with the reason
        self._loading: set[int] = set()  # what this start has begun and not ended
        self._one_by_one = False

    def begin(self) -> tuple[list[int], bool]:
        """A start of the process: the models that it is to load, and whether one by one."""
        self._loading.clear()
        wanted = [number for number in self.numbers if number not in self._left_out]
        self.states = {number: ModelState("failed", why) for number, why in self._left_out.items()}
        self.states |= {number: ModelState("loading") for number in wanted}
        # What was never at fault comes first: it must not wait for what may end the process again.
        return sorted(wanted, key=lambda number: self._losses[number]), self._one_by_one

    def loads(self, number: int) -> None:
        """The process has begun with a model."""
        self._loading.add(number)

    def ready(self, number: int, info: ModelInfo) -> None:
        """A model works."""
        self._end(number, ModelState("ready", "", info))
        self._losses.pop(number, None)

    def failed(self, number: int, message: str) -> None:
        """A model cannot be loaded."""
        self._end(number, ModelState("failed", message))

    def lost(self, how: str) -> str | None:
        """The process has ended, `was killed by SIGKILL` say; what the log should tell of a model left out for it."""
        blamed, self._loading = self._loading, set()
        self._one_by_one = len(self.numbers) > 1 and bool(blamed or self._one_by_one)
        self.states = {number: ModelState("loading", "starting again") for number in self.numbers}
        if len(blamed) != 1 or len(self.numbers) == len(self._left_out) + 1:
            return None
        (number,) = blamed
        self._losses[number] += 1
        if self._losses[number] < LOSSES_MAX:
            return None
        self._left_out[number] = f"the engine process {how} while it loaded this model, {LOSSES_MAX} times"
        return self._left_out[number]

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
