"""`embert info MODEL`: what a model is, and how this machine would run it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import orjson

from embert.engine import Model, load_encoder, load_model
from embert.engine.errors import EngineError
from embert.engine.tokenization.tokenizer import Tokenizer
from embert.server.bulk.job import BulkError
from embert.server.bulk.writer import write_errors
from embert.server.cli import encoder_options, report_failure

__all__ = ["info"]


def info(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status. What the files say is printed even where the model cannot run here."""
    try:
        model = load_model(arguments.model, revision=arguments.revision, pooling=arguments.pooling)
    except EngineError as error:
        report_failure(error)
        return 1
    facts = _facts(model)
    failure: Exception | None = None
    try:
        facts |= _encoder_facts(model, arguments)
    except EngineError as error:
        failure = error
    try:
        with write_errors("standard output"):
            _print(facts if failure is None or not arguments.json else facts | {"error": str(failure)}, arguments)
    except BulkError as error:
        failure = error
    if failure is not None:
        report_failure(failure)
        return 1
    return 0


def _print(facts: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        for name, value in facts.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            sys.stdout.write(f"{name.replace('_', ' '):20} {'-' if shown in (None, '') else shown}\n")
    sys.stdout.flush()


def _facts(model: Model) -> dict[str, Any]:
    """What the model's files say."""
    config, classifier = model.config, model.heads.classifier
    return {
        "model": model.model_id,
        "revision": model.revision,
        "folder": str(model.folder),
        "architecture": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "activation": config.activation,
        "vocabulary": config.vocab_size,
        "tasks": model.task_names,
        "labels": list(classifier.labels) if classifier else None,
        "scores": classifier.activation if classifier else None,
        "pooling": model.pooling if model.embeds else None,
        "dimensions": model.width if model.embeds else None,
        "max_input_length": model.max_input_length,
        "prompts": sorted(model.prompts),
        "adapters": list(config.adapters.names) if config.adapters else None,
        "notices": list(model.notices),
    }


def _encoder_facts(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """How this machine runs it. Raises EngineError where it cannot."""
    Tokenizer(model)  # raises for one that cannot be read
    began = time.monotonic()
    encoder = load_encoder(model, **encoder_options(arguments))
    try:
        return {
            "encoder": encoder.name,
            "device": encoder.device,
            "device_name": encoder.device_name,
            "dtype": encoder.dtype,
            "choice": encoder.choice,
            "agreement": encoder.int8_accuracy,
            "max_batch_tokens": encoder.max_batch_tokens,
            "load_seconds": round(time.monotonic() - began, 2),
        }
    finally:
        encoder.close()
