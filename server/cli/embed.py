"""`embert embed`: many texts without HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from embert.engine import load_encoder, load_model
from embert.engine.encoders.devices import devices
from embert.engine.errors import EngineError
from embert.engine.tasks import Task
from embert.server.bulk.job import BulkError, Job, OutputFormat
from embert.server.bulk.reader import Reader, expand, open_input
from embert.server.bulk.rows import kept_schema
from embert.server.bulk.run import DeviceConfig, embed_files, embed_texts
from embert.server.bulk.writer import FileWriter, StreamWriter, Writer
from embert.server.cli.arguments import encoder_options, read_format
from embert.server.config import ConfigError

_SHARD_TEXTS = 250_000


def embed(arguments: argparse.Namespace) -> None:
    """Runs `embert embed`. Raises ConfigError for options that do not go together."""
    _check(arguments)
    output: Writer | None = None
    try:
        with ExitStack() as stack:
            # Files first, so that their errors are reported before a model is loaded.
            files = expand(arguments.file or (), arguments.output)
            job = _job(arguments, files)
            source = open_input(files, job) if files else None
            job = _with_schema(job, source)
            output = _output(arguments, job, files, stack)
            model = load_model(
                arguments.model,
                revision=arguments.revision,
                pooling=arguments.pooling,
                progress=not arguments.quiet,
            )
            names = devices(arguments.device, arguments.encoder, model, dtype=arguments.dtype)
            if source is None:
                encoder = load_encoder(model, **encoder_options(arguments) | {"device": names[0]})
                stack.callback(encoder.close)
                embed_texts(job, model, arguments.texts, encoder, output)
            else:
                device_config = DeviceConfig(
                    names=names,
                    encoder=encoder_options(arguments),
                    tokenization_processes=arguments.tokenization_workers,
                )
                embed_files(job, model, source, output, device_config, resume=arguments.resume, quiet=arguments.quiet)
    except BrokenPipeError:
        raise
    except (EngineError, OSError, BulkError, KeyboardInterrupt):
        if output is not None and output.completed and not output.is_finished:
            sys.stderr.write(f"embert: {output.completed} texts are complete; --resume goes on after them\n")
        raise


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go together."""
    if bool(arguments.texts) == (arguments.file is not None):
        raise ConfigError("give texts, or --file with files of texts (- for standard input), and not both")
    if arguments.resume and (arguments.file is None or arguments.output is None):
        raise ConfigError("--resume goes with --file and --output")
    if arguments.overwrite and (arguments.output is None or _is_folder(arguments)):
        raise ConfigError("--overwrite goes with --output and a file; of a folder, remove the shards")
    if arguments.queries and not arguments.multi:
        raise ConfigError("--queries goes with --multi")
    if arguments.keep is not None and arguments.keep_all:
        raise ConfigError("--keep and --keep-all exclude each other; both were given")
    for option, value, least in (
        ("--shard-texts", arguments.shard_texts, 1),
        ("--tokenization-workers", arguments.tokenization_workers, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option} must be at least {least}; it is {value}")
    if arguments.sparse or arguments.multi:
        kind = "--sparse" if arguments.sparse else "--multi"
        if arguments.dimensions is not None or not arguments.normalize:
            raise ConfigError(f"{kind} goes without --dimensions and --no-normalize")
        if _output_format(arguments) == "npy":
            raise ConfigError(f"{kind} writes JSON lines or Parquet: an array {arguments.output} cannot hold them")
    if arguments.on_error == "skip" and _output_format(arguments) == "npy":
        raise ConfigError("--on-error skip goes with JSON lines and Parquet: rows of an array have no other name")


def _is_folder(arguments: argparse.Namespace) -> bool:
    path = arguments.output
    return path is not None and (arguments.shard_texts is not None or path.endswith("/") or Path(path).is_dir())


def _output_format(arguments: argparse.Namespace) -> OutputFormat:
    if arguments.output_format is not None:
        output_format: OutputFormat = arguments.output_format
        return output_format
    if _is_folder(arguments):
        return "parquet"
    suffix = Path(arguments.output or "").suffix
    return "npy" if suffix == ".npy" else "parquet" if suffix in (".parquet", ".pq") else "jsonl"


def _job(arguments: argparse.Namespace, files: Sequence[str]) -> Job:
    return Job(
        task=Task.SPARSE if arguments.sparse else Task.MULTI if arguments.multi else Task.EMBED,
        is_query=arguments.queries,
        adapter=arguments.task,
        prompt_name=arguments.prompt_name,
        instruction=arguments.instruction,
        normalize=arguments.normalize,
        dimensions=arguments.dimensions,
        truncate=arguments.truncate,
        input_format=read_format(arguments, files),
        column=arguments.column or "text",
        keep=None if arguments.keep_all else tuple(dict.fromkeys(arguments.keep or ())),
        output_format=_output_format(arguments),
        skip_invalid_rows=arguments.on_error == "skip",
    )


def _with_schema(job: Job, source: Reader | None) -> Job:
    """Adds the schema of the kept columns to the job. Raises BulkError if the input does not have them."""
    schema = None if source is None else source.schema
    if job.output_format == "parquet":
        schema = kept_schema(job, source)
        job = dataclasses.replace(job, schema=schema.serialize().to_pybytes())
    names = job.kept_columns
    for name in {*(names or ()), *(schema.names if names is None and schema is not None else ())} & {
        *job.vector_columns
    }:
        raise BulkError(f"the column {name!r} of the input has the name of one of the output; name others with --keep")
    return job


def _output(arguments: argparse.Namespace, job: Job, files: Sequence[str], stack: ExitStack) -> Writer:
    path = arguments.output
    if path is None or (Path(path).exists() and not Path(path).is_dir() and not Path(path).is_file()):
        if job.output_format != "jsonl":
            raise BulkError(f"{path or 'standard output'} takes JSON lines only, and {job.output_format} was asked for")
        if path is None and sys.stdout is None:
            raise BulkError("standard output is closed; --output names a file")
        if path is None:
            return StreamWriter(sys.stdout.buffer, "standard output")
        return StreamWriter(stack.enter_context(Path(path).open("wb")), path)
    shard_rows = None
    if _is_folder(arguments):
        if not files:
            raise BulkError(f"{path} is a folder, which takes the texts of --file only")
        shard_rows = arguments.shard_texts or _SHARD_TEXTS
    return stack.enter_context(
        FileWriter(path, job.output_format, shard_rows, overwrite=arguments.overwrite, resume=arguments.resume)
    )
