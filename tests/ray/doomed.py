"""A stand-in encoder that meets its end where a test wants it: `encoder="tests.ray.doomed:create"`.

A test writes what is to happen, once, at the second forward of an actor, into the file `fate` of the folder that FOLDER
names: `lose` (the encoder says that it is lost), or the id of a node on which forwards then never end. The file
`working` says that it has come to this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from embert.engine import Encoder, PackedBatch, Task, TaskOutput
from embert.engine.errors import EncoderLost
from embert.engine.model import Model
from tests.server.stand_in import StandIn

FOLDER = "DOOMED_FOLDER"


class Doomed(StandIn):
    """Vectors are those of the stand-in."""

    encode_batches = 0

    def wait(self, ticket: PackedBatch) -> dict[Task, TaskOutput]:
        self.encode_batches += 1
        folder = Path(os.environ[FOLDER])
        fate = folder / "fate"
        if self.encode_batches == 2 and fate.exists():
            if fate.read_text() == "lose":
                fate.unlink()
                raise EncoderLost("the encoder was told to be lost")
            import ray  # of an extra; whoever collects these tests may lack it

            while fate.read_text() == ray.get_runtime_context().get_node_id():
                (folder / "working").touch()
                time.sleep(0.01)
        return super().wait(ticket)


def create(model: Model, **options: Any) -> Encoder:
    return Doomed(model, **options)
