"""The command `embert`: serve, embed, rerank, classify, entities, decide, info."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from embert import __version__
from embert.server.config import ConfigError, ServeConfig, check_environment, environment_name, option_name

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_SOURCE = "a local folder or a hub id"  # MODEL of a command other than serve
_OPTIONS = {"labels": "label", "ignore_labels": "ignore_label"}  # arguments of the engine whose options differ


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Omits the usage that argparse prints, which is longer than a screen."""
        _fail(f"{message}; {self.prog} --help lists the options", 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. Raises SystemExit: 0, 1 for a failure, 2 for wrong arguments."""
    arguments = _parse(argv)
    try:
        if arguments.command == "serve":
            config = _serve_config(arguments, os.environ)  # first, so that wrong arguments are reported at once
            from embert.server.cli.serve import serve

            status = serve(config)
        else:
            if sys.stdout is None and arguments.command != "embed":  # which may have --output
                _fail("standard output is closed", 1)
            status = _run(arguments)
    except ConfigError as error:
        _fail(error, 2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output has exited
        status = 1
    if status and sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:  # reported already; Python would report it again when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(status)


def parse_serve(argv: Sequence[str], environment: Mapping[str, str]) -> ServeConfig:
    """Returns the configuration of `embert serve ARGV`. Raises ConfigError, or SystemExit for unknown arguments."""
    return _serve_config(_parse(["serve", *argv]), environment)


def _run(arguments: argparse.Namespace) -> int:
    """Runs a command other than serve; returns the exit status."""
    from embert.engine.errors import EngineError
    from embert.server.bulk.job import BulkError

    module = "classify" if arguments.command == "entities" else arguments.command
    run = getattr(importlib.import_module(f"embert.server.cli.{module}"), arguments.command)
    try:
        run(arguments)
    except BrokenPipeError:
        raise
    except (EngineError, OSError, BulkError) as error:
        sys.stderr.write(f"embert: error: {_message(error)}\n")
        return 1
    return 0


def _message(error: Exception) -> str:
    """Describes the error in one line. An argument of the engine is named as its option: `top_n` is --top-n."""
    from embert.engine.errors import InputError

    if isinstance(error, InputError):
        name = error.param.partition("[")[0]
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        prefix = "" if error.param == "texts" else f"{option}:" if error.subject else option
        return " ".join(filter(None, (prefix, error.subject, error.reason)))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:  # without the errno
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        command = f"embert {arguments.command}"
        _fail(f"{' '.join(unknown)}: no such argument of {command}; {command} --help lists the options", 2)
    return arguments


def _fail(error: Exception | str, status: int) -> NoReturn:
    sys.stderr.write(f"embert: error: {error}\n")
    raise SystemExit(status) from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="embert", description="Embeddings and scores from text encoders: the BERT family and decoders."
    )
    parser.add_argument("--version", action="version", version=f"embert {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{serve,embed,rerank,classify,entities,decide,info}"
    )

    serve = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serve a model over HTTP. Every option is also an environment variable: --max-batch-tokens is "
        "EMBERT_MAX_BATCH_TOKENS; repeatable ones take a comma-separated list there.",
        argument_default=argparse.SUPPRESS,
    )
    for option in dataclasses.fields(ServeConfig):
        _add_option(serve, option)

    embed = commands.add_parser(
        "embed",
        help="embed texts without a server",
        description="Embed texts, or files of them, on every device: JSON lines, a .npy file of float32 rows, or "
        "Parquet, in one file or a folder of shards. An interrupted run can be resumed.",
    )
    embed.add_argument("texts", nargs="*", metavar="TEXT", help="texts to embed")
    _add_bulk_options(embed)
    kinds = embed.add_mutually_exclusive_group()
    kinds.add_argument("--sparse", action="store_true", help="sparse vectors: ids of tokens and their weights")
    kinds.add_argument("--multi", action="store_true", help="a vector for each token, for late interaction")
    embed.add_argument("--queries", action="store_true", help="with --multi: the texts are queries, not documents")
    embed.add_argument("--dimensions", type=int, metavar="N", help="truncate the vectors to N numbers")
    embed.add_argument("--task", metavar="NAME", help="name of the model's adapter, and of its prompt")
    embed.add_argument("--prompt-name", metavar="NAME", help="name of the model's prompt that precedes each text")
    embed.add_argument("--instruction", metavar="TEXT", help="instruction in place of that in the prompt of queries")
    embed.add_argument(
        "--no-normalize", dest="normalize", action="store_false", help="do not scale vectors to length 1"
    )
    _add_common_options(embed)
    embed.add_argument("--model", "-m", metavar="MODEL", help=f"{_SOURCE}; default: the packaged model")
    _add_load_options(embed, "pooling")

    rerank = commands.add_parser(
        "rerank",
        help="order texts by their scores with a query, without a server",
        description="Score each text of files, or of standard input, with a query: one JSON line for each, {index, "
        "score}, best first.",
    )
    rerank.add_argument("model", metavar="MODEL", help=f"a reranker: {_SOURCE}")
    rerank.add_argument("--query", required=True, metavar="TEXT", help="the query to score the texts with")
    _add_input_options(rerank)
    rerank.add_argument("--top-n", type=int, metavar="N", help="the best N texts only")
    rerank.add_argument("--raw", action="store_true", help="the model's logits instead of scores")
    rerank.add_argument("--return-text", action="store_true", help="the texts too")
    rerank.add_argument("--prompt-name", metavar="NAME", help="name of the model's prompt that precedes the query")
    rerank.add_argument("--instruction", metavar="TEXT", help="instruction in place of the model's own")
    _add_common_options(rerank, "pair")
    _add_load_options(rerank)

    classify = commands.add_parser(
        "classify",
        help="label texts, without a server",
        description="Label the texts of files: one JSON line for each, {text, labels}, with all labels, best first.",
    )
    _add_labeling_options(classify, "a classifier, or with --label a model of natural language inference: ")
    classify.add_argument("--raw", action="store_true", help="the model's logits instead of scores; not with --label")
    classify.add_argument(
        "--label",
        "-l",
        action="append",
        metavar="LABEL",
        help="a label of your own, in place of the model's; repeatable",
    )
    classify.add_argument(
        "--hypothesis-template",
        metavar="TEXT",
        help="with --label: the sentence that a label stands for, with {} for the label (default: This example is {}.)",
    )
    classify.add_argument(
        "--multi-label", action="store_true", help="with --label: score each label by itself, not against the others"
    )

    entities = commands.add_parser(
        "entities",
        help="find entities in texts, without a server",
        description="Find the entities of the texts of files: one JSON line for each, {text, entities}.",
    )
    _add_labeling_options(entities, "a classifier of tokens: ")
    entities.add_argument(
        "--aggregation-strategy",
        choices=("none", "simple", "first", "average", "max"),
        default="simple",
        help="method that joins tokens to entities (default: %(default)s)",
    )
    entities.add_argument(
        "--ignore-label", action="append", metavar="LABEL", help="a label without entities; repeat it (default: O)"
    )
    entities.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="read a long text in sequences that share N tokens; default: cut it",
    )

    decide = commands.add_parser(
        "decide",
        help="answer questions about texts, without a server",
        description="Answer the questions of each request of a file with the probabilities of their options: one JSON "
        "line for each request, {answers}.",
    )
    decide.add_argument("model", metavar="MODEL", help=f"a model that decides: {_SOURCE}")
    decide.add_argument(
        "file",
        metavar="FILE",
        help="requests as POST /v1/decisions or /v1/systemone takes them: one JSON object, a list, or one object a "
        "line; -: standard input",
    )
    _add_common_options(decide, "state")
    _add_load_options(decide)

    info = commands.add_parser("info", help="show the metadata of a model and the encoder that would run it")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.add_argument("model", nargs="?", metavar="MODEL", help=f"{_SOURCE}; default: the packaged model")
    _add_load_options(info, "pooling")
    return parser


def _add_common_options(parser: argparse.ArgumentParser, inputs: str = "text") -> None:
    parser.add_argument(
        "--no-truncate", dest="truncate", action="store_false", help=f"fail on a {inputs} that is too long"
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress bar")


def _add_labeling_options(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("model", metavar="MODEL", help=kind + _SOURCE)
    _add_input_options(parser, required=True)
    parser.add_argument("--keep-all", action="store_true", help="all columns of the input go to the output")
    _add_common_options(parser)
    _add_load_options(parser)


def _add_input_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--file",
        "-f",
        nargs="+",
        action="extend",
        required=required,
        metavar="PATH",
        help="files or globs: text (one a line), or by their ending .jsonl, .csv, .tsv, .parquet, and .gz or .zst "
        "after those; -: standard input",
    )
    formats = ("text", "jsonl", "csv", "tsv", "parquet")
    parser.add_argument("--input-format", choices=formats, help="format of the files, whatever their names")
    parser.add_argument("--column", metavar="NAME", help="the column or field of the texts (default: text)")


def _add_bulk_options(embed: argparse.ArgumentParser) -> None:
    _add_input_options(embed)
    embed.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="rows without a text of UTF-8, or whose text cannot be tokenized: end the run (the default), or skip them",
    )
    embed.add_argument(
        "--output",
        "-o",
        metavar="PATH",
        help="where to write: float32 rows to a name in .npy, Parquet to one in .parquet, else JSON lines; shards to a "
        "folder, which ends in / or exists; default: stdout",
    )
    embed.add_argument(
        "--output-format", choices=("jsonl", "npy", "parquet"), help="format of the output; of a folder: parquet"
    )
    embed.add_argument(
        "--shard-texts", type=int, metavar="N", help="rows of the input in each file of a folder (default: 250000)"
    )
    embed.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="columns of the input that go to the output, instead of the text's",
    )
    embed.add_argument("--keep-all", action="store_true", help="all columns of the input go to the output")
    embed.add_argument("--overwrite", action="store_true", help="replace the file that --output names")
    embed.add_argument("--resume", action="store_true", help="continue an interrupted run; with --file and --output")
    embed.add_argument(
        "--tokenization-workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that read, tokenize and format; 0: one for each CPU that the engines leave (default: 0)",
    )


def _add_load_options(parser: argparse.ArgumentParser, *more: str) -> None:
    for name in ("revision", "device", "dtype", "min_agreement", "encoder", *more):
        option = ServeConfig.__dataclass_fields__[name]
        choices = option.metadata.get("choices")
        _add_option(parser, option, default=option.default, **({} if choices is None else {"choices": choices}))


def _kind(option: dataclasses.Field[Any]) -> tuple[type, bool]:
    """Returns the type of one value of an option, and True if it may be repeated."""
    hint = typing.get_type_hints(ServeConfig)[option.name]
    if isinstance(hint, types.UnionType):
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _add_option(parser: argparse.ArgumentParser, option: dataclasses.Field[Any], **common: Any) -> None:
    """Adds an option of `embert serve`. ServeConfig has its default, which an environment variable replaces."""
    kind, repeatable = _kind(option)
    text = option.metadata["help"].replace("%", "%%")
    default = option.default
    if default not in (None, ()) and "default" not in text:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text += f" (default: {shown})"
    common["help"] = text
    if option.metadata.get("positional"):
        parser.add_argument(option.name, nargs="*" if repeatable else "?", metavar=option.name.upper(), **common)
    elif kind is bool:
        parser.add_argument(option_name(option.name), action=argparse.BooleanOptionalAction, **common)
    elif repeatable:
        parser.add_argument(option_name(option.name), action="append", type=kind, metavar="VALUE", **common)
    else:
        choices = option.metadata.get("choices")
        usual = option.metadata.get("metavar", {int: "N", float: "SECONDS"}.get(kind, "VALUE"))
        metavar = "{" + ",".join(choices) + "}" if choices else usual
        parser.add_argument(option_name(option.name), type=kind, metavar=metavar, **common)


def _serve_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ServeConfig:
    check_environment(environment)
    values: dict[str, Any] = {}
    for option in dataclasses.fields(ServeConfig):
        value = getattr(arguments, option.name, None)
        if value is not None:
            values[option.name] = tuple(value) if isinstance(value, list) else value
        elif (text := environment.get(environment_name(option.name))) or (
            text is not None and option.metadata.get("guards")
        ):
            values[option.name] = _from_environment(option, text)
    return ServeConfig(**values)


def _from_environment(option: dataclasses.Field[Any], text: str) -> Any:
    kind, repeatable = _kind(option)
    convert: Callable[[str], Any] = _boolean if kind is bool else kind
    try:
        if repeatable:
            values = tuple(convert(piece.strip()) for piece in text.split(",") if piece.strip())
            if not values:  # a key that is blank by mistake must not open the server
                raise ConfigError(
                    f"{environment_name(option.name)} is set and has no value in it; unset it, or set one"
                )
            return values
        return convert(text)
    except ValueError:
        shown = "its value" if option.metadata.get("secret") else repr(text)
        raise ConfigError(f"{environment_name(option.name)}: {shown} is not a {kind.__name__}") from None


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


if __name__ == "__main__":
    main()
