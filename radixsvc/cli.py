"""The command line. Exit status: 0 done, 1 failed, 2 wrong usage, 69 no service there, 78 wrong
configuration or model.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from radixsvc import __version__
from radixsvc.chat import chat
from radixsvc.client import DEFAULT_URL, ApiError, Client
from radixsvc.config import Loaded, entries, flatten, load
from radixsvc.errors import SetupError

BENCHES = ("attention", "copy", "cuda", "engine", "http", "serve", "tiered", "tiers", "tree")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int | None] = args.run
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are for people
    try:
        return run(args) or 0
    except SetupError as error:
        return _failed(error, error.exit_code)
    except ApiError as error:
        hint = ": give --api-key, or set RADIXSVC_API_KEY" if error.status == 401 else ""
        return _failed(f"{error}{hint}", 69 if error.status == 503 else 1)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        return _failed(f"{error} is not an address: write it as {DEFAULT_URL}", 2)
    except aiohttp.ClientConnectorError as error:
        where = f"{error.host}:{error.port}"
        return _failed(f"no service answers at {where}; start one with: radixsvc serve", 69)
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        name = type(error).__name__
        return _failed(f"no answer that can be read ({name}): is it a radixsvc service?", 69)
    except ModuleNotFoundError as error:
        if error.name != "tiers._kernels":
            raise
        remedy = "run pip install . where there is a C compiler"
        return _failed(f"the extension is not built: {remedy}", 78)
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _failed(reason: object, status: int) -> int:
    print(f"radixsvc: {reason}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixsvc", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config, model, remote, prompt, sampling, system, as_json = (
        argparse.ArgumentParser(add_help=False) for _ in range(7)
    )
    add = partial(config.add_argument, metavar="KEY=VALUE", action="append", dest="sets")
    add("--set", default=[], help="any setting, as print-config lists them; may be repeated")
    for key in ("model.name", "model.dtype", "model.device", "server.host", "server.port"):
        option = key.removesuffix(".name").split(".")[-1]
        text = f"short for --set {key}={option.upper()}"
        add(f"--{option}", metavar=option.upper(), type=f"{key}={{}}".format, help=text)
    file, text = os.environ.get("RADIXSVC_CONFIG"), "a TOML file; default: $RADIXSVC_CONFIG"
    config.add_argument("--config", metavar="FILE", default=file, help=text)
    model.add_argument("model", nargs="?", help="a .gguf file or a hub id")
    remote.add_argument("--url", help=f"default: $RADIXSVC_URL or {DEFAULT_URL}")
    remote.add_argument("--api-key", help="default: $RADIXSVC_API_KEY")
    prompt.add_argument("prompt", help="the text, @FILE, or - for standard input")
    sampling.add_argument("--max-tokens", type=int, default=512)
    sampling.add_argument("--temperature", type=float, default=0.2)
    sampling.add_argument("--seed", type=int)
    system.add_argument("--system", help="a system message")
    as_json.add_argument("--json", action="store_true", help="for programs")
    for name, run, text, *options in (
        ("serve", _serve, "load a model and serve it", config),
        ("print-config", _print_config, "every setting, its origin, what fits", config, as_json),
        ("check-config", _check_config, "say whether the configuration is right", config),
        ("fetch", _fetch, "download or convert a model; serve does it by itself", model),
        ("doctor", _doctor, "what this machine and this build have, what to do", as_json),
        ("version", _version, "the version"),
        ("chat", _remote, "talk to the model", system, sampling, remote),
        ("generate", _remote, "complete a text", prompt, sampling, remote, as_json),
        ("explain", _remote, "why a prompt is not cached any further", prompt, remote, as_json),
        ("warm", _remote, "compute a prompt's keys and values now", prompt, remote, as_json),
        ("stats", _remote, "what the service is doing", remote, as_json),
        ("tree", _remote, "the cached prefixes", remote, as_json),
    ):
        added = commands.add_parser(name, help=text, description=text, parents=options)
        added.set_defaults(run=run, command=name)
    for name, text in (
        ("bench", f"measure one or several of {', '.join(BENCHES)}"),
        ("simulate", "what cache policies would make of a trace or a workload; no model"),
        ("demo", "the cache's moves, step by step"),
    ):  # their options are their modules', which take long to import
        added = commands.add_parser(name, add_help=False, prefix_chars="\0", help=text)
        added.add_argument("words", nargs=argparse.REMAINDER)
        added.set_defaults(run=_bench, command=name)
    return parser


def _load(args: argparse.Namespace) -> Loaded:
    return load(args.config, os.environ, args.sets)


def _serve(args: argparse.Namespace) -> int:
    config = _load(args).config
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the service has its own
    import uvloop  # these take seconds to import, which the other commands need not wait for

    from radixsvc import log, service

    log.setup(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(service.serve(config))
        os._exit(status)  # not held up by a model that is still loading


def _print_config(args: argparse.Namespace) -> None:
    from radixsvc.startup import capacity

    config, origins = _load(args)
    rows = [(key, value, origins.get(key, "default")) for key, value in entries(config)]
    if args.json:
        return _print_json({key: {"value": value, "origin": from_} for key, value, from_ in rows})
    table((key, msgspec.json.encode(v).decode().strip('"') or "-", from_) for key, v, from_ in rows)
    print("\n" + capacity(config))


def _check_config(args: argparse.Namespace) -> None:
    from radixsvc.admission import KeyRing
    from radixsvc.service import refuse_open_door

    config = _load(args).config
    refuse_open_door(config, KeyRing.load(config.server.keys_file))
    print("the configuration is right")


def _fetch(args: argparse.Namespace) -> None:
    from radixsvc.fetch import fetch

    print(fetch(args.model))


def _doctor(args: argparse.Namespace) -> int:
    from radixsvc.doctor import examine

    findings = list(examine())
    if args.json:
        _print_json({subject: {"mark": mark, "found": found} for mark, subject, found in findings})
    else:
        table(findings)
    return int(any(mark == "!!" for mark, _, _ in findings))


def _version(args: argparse.Namespace) -> None:
    print(__version__)


def _remote(args: argparse.Namespace) -> None:
    """Ask a running service, and print a table, a text or JSON."""
    sampling = {name: getattr(args, name, None) for name in ("max_tokens", "temperature", "seed")}
    options = {name: value for name, value in sampling.items() if value is not None}
    with Client(args.url, args.api_key) as client:
        if args.command == "chat":
            client.get("/v1/models")  # nobody there is better known before the first question
            return chat(client, args.system, **options)
        if args.command in ("stats", "tree"):
            found = client.get(f"/v1/{args.command}")
        elif args.command == "warm":
            found = client.prefix("warm", prompt=_text(args.prompt))
        elif args.command == "explain":
            found = msgspec.to_builtins(client.explain(prompt=_text(args.prompt)))
        else:
            found = msgspec.to_builtins(client.complete(_text(args.prompt), **options))
    if args.json:
        _print_json(found)
    elif args.command == "generate":
        print(found["choices"][0]["text"])
    elif args.command == "tree":
        print(found["text"])
    elif args.command == "explain":
        print(found["summary"])
        table((name, repr(value)) for name, value in (found["divergence"] or {}).items())
    else:
        table((".".join(path), value) for path, value in flatten(found))


def _text(argument: str) -> str:
    """A prompt from the command line: itself, @FILE or - for standard input."""
    if argument == "-":
        return sys.stdin.read()
    if argument.startswith("@"):
        try:
            return Path(argument[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the prompt can't be read: {error}", 2) from None
    return argument


def _bench(args: argparse.Namespace) -> None:
    """Run a module of `radixsvc.bench`, or the benchmarks that the first words name, which share
    the options that follow."""
    from radixsvc.bench.report import print_metrics

    if args.command != "bench":
        module, options = _module(args.command, args.words)
        module.run(options)
        return
    names = list(itertools.takewhile(BENCHES.__contains__, args.words))
    if not names:
        text = f"write radixsvc bench NAME... [OPTIONS], with {', '.join(BENCHES)} as names"
        if args.words[:1] in (["-h"], ["--help"]):
            return print(text)
        raise SetupError(text, 2)
    runs = [_module("bench " + name, args.words[len(names) :]) for name in names]
    metrics = [metric for module, options in runs for metric in module.run(options)]
    print_metrics(metrics, runs[0][1].json)


def _module(command: str, words: list[str]) -> tuple[Any, argparse.Namespace]:
    """A module of `radixsvc.bench`, and these words as its options."""
    module = importlib.import_module(f"radixsvc.bench.{command.split()[-1]}")
    parser = argparse.ArgumentParser(
        prog=f"radixsvc {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    if command.startswith("bench "):
        parser.add_argument("--json", action="store_true", help="for programs")
    return module, parser.parse_args(words)


def table(rows: Iterable[Iterable[Any]]) -> None:
    """Print rows in aligned columns."""
    forms = {int: "{:,}", float: "{:.4g}"}
    cells = [[forms.get(type(cell), "{}").format(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _print_json(data: Any) -> None:
    print(msgspec.json.encode(data).decode())


if __name__ == "__main__":
    sys.exit(main())
