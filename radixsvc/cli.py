"""The command line. Exit status: 0 done, 1 failed, 2 wrong usage, 69 no service there, 78 wrong
configuration or model.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from radixsvc import __version__
from radixsvc import config as configuration
from radixsvc.chat import chat
from radixsvc.client import ApiError, Client
from radixsvc.errors import SetupError

TOOLS = {
    "simulate": "what cache policies would make of a trace or a workload; no model",
    "demo": "the cache's moves, step by step",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except SetupError as error:
        print(f"radixsvc: {error}", file=sys.stderr)
        return error.exit_code
    except aiohttp.ClientConnectionError as error:
        print(f"radixsvc: no service answers ({error}); start one with: radixsvc serve",
              file=sys.stderr)  # fmt: skip
        return 69
    except ModuleNotFoundError as error:
        if error.name != "tiers._kernels":
            raise
        print("radixsvc: the extension is not built: run pip install . where there is a C "
              "compiler", file=sys.stderr)  # fmt: skip
        return 78
    except ApiError as error:
        print(f"radixsvc: {error}", file=sys.stderr)
        return 69 if error.status == 503 else 1
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixsvc", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    for name, run, text in (
        ("serve", _serve, "load a model and serve it"),
        ("print-config", _print_config, "every setting, where it is from, and what fits"),
        ("check-config", _check_config, "say whether the configuration is right"),
    ):
        _add_config_options(command(name, run, text))
    fetch = command("fetch", _fetch, "download or convert a model; serve does it by itself")
    fetch.add_argument("model", nargs="?", help="a .gguf file or a hub id")
    command("doctor", _doctor, "what this machine and this build have, and what to do")
    command("version", _version, "the version")
    prompt_help = "the text, @FILE, or - for standard input"
    for name, text in (
        ("chat", "talk to the model"),
        ("generate", "complete a text"),
        ("explain", "why a prompt is not cached any further"),
        ("warm", "compute a prompt's keys and values now"),
        ("stats", "what the service is doing"),
        ("tree", "the cached prefixes"),
    ):
        added = command(name, _remote, text)
        added.set_defaults(command=name)
        added.add_argument("--url", help="default: $RADIXSVC_URL or http://127.0.0.1:8011")
        added.add_argument("--api-key", help="default: $RADIXSVC_API_KEY")
        added.add_argument("--json", action="store_true", help="for programs")
        if name in ("chat", "generate"):
            added.add_argument("--max-tokens", type=int, default=512)
            added.add_argument("--temperature", type=float, default=0.2)
            added.add_argument("--seed", type=int)
        if name == "chat":
            added.add_argument("--system", help="a system message")
        if name in ("generate", "explain", "warm"):
            added.add_argument("prompt", help=prompt_help)
    bench = commands.add_parser(
        "bench", help="measure", description="Measure one of these, or several."
    )
    benches = bench.add_subparsers(required=True, metavar="NAME")
    for file in sorted((Path(__file__).parent / "bench").glob("[a-z]*.py")):
        if "def add_arguments(" in file.read_text():
            under = commands if file.stem in TOOLS else benches
            added = under.add_parser(
                file.stem, add_help=False, prefix_chars="\0", help=TOOLS.get(file.stem)
            )
            added.add_argument("rest", nargs=argparse.REMAINDER)
            added.set_defaults(run=_bench, name=file.stem)
    return parser


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", default=os.environ.get("RADIXSVC_CONFIG"))
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets")
    for option, key in (
        ("--model", "model.name"),
        ("--dtype", "model.dtype"),
        ("--device", "model.device"),
        ("--host", "server.host"),
        ("--port", "server.port"),
    ):
        parser.add_argument(
            option,
            help=f"short for --set {key}=",
            type=f"{key}={{}}".format,
            action="append",
            dest="sets",
        )


def _load(args: argparse.Namespace) -> configuration.Loaded:
    return configuration.load(args.config, os.environ, args.sets)


def _serve(args: argparse.Namespace) -> int:
    config = _load(args).config
    import uvloop  # these take a second to import, which the other commands need not wait for

    from radixsvc import log, service

    log.setup(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(service.serve(config))
    if any(thread.name == service.LOADER for thread in threading.enumerate()):
        os._exit(status)  # C code that is still loading must not meet a dying interpreter
    return status


def _print_config(args: argparse.Namespace) -> int:
    from radixsvc.startup import capacity

    config, origins = _load(args)
    table(
        (path, value if value != "" else "-", origins.get(path, "default"))
        for path, value in configuration.entries(config)
    )
    print("\n" + capacity(config))
    return 0


def _check_config(args: argparse.Namespace) -> int:
    from radixsvc.admission import KeyRing
    from radixsvc.service import refuse_open_door

    config = _load(args).config
    refuse_open_door(config, KeyRing.load(config.server.keys_file))
    print("the configuration is right")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from radixsvc.fetch import fetch

    print(fetch(args.model))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from radixsvc.doctor import examine

    findings = examine()
    table((mark, what, found) for mark, what, found in findings)
    return 0 if all(mark != "!!" for mark, _, _ in findings) else 1


def _version(args: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _remote(args: argparse.Namespace) -> int:
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
        print(msgspec.json.encode(found).decode())
    elif args.command == "generate":
        print(found["choices"][0]["text"])
    elif args.command == "tree":
        print(found["text"])
    elif args.command == "explain":
        print(found["summary"])
        table((name, repr(value)) for name, value in (found["divergence"] or {}).items())
    else:
        table(_flat(found))
    return 0


def _bench(args: argparse.Namespace) -> int:
    """Run modules of `radixsvc.bench`; a tool prints for itself, a benchmark gives figures."""
    if args.name in TOOLS:
        module, parsed = _module_options(args.name, args.rest)
        status: int = module.run(parsed)
        return status
    from radixsvc.bench.report import print_metrics

    names, rest = [args.name], args.rest
    while rest and (Path(__file__).parent / "bench" / f"{rest[0]}.py").exists():
        names, rest = [*names, rest[0]], rest[1:]
    runs = [_module_options(name, rest) for name in names]
    metrics = [metric for module, parsed in runs for metric in module.run(parsed)]
    print_metrics(metrics, runs[0][1].json)
    return 0


def _module_options(name: str, rest: list[str]) -> tuple[Any, argparse.Namespace]:
    module = importlib.import_module(f"radixsvc.bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"radixsvc {'' if name in TOOLS else 'bench '}{name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    if name not in TOOLS:
        parser.add_argument("--json", action="store_true", help="for programs")
    return module, parser.parse_args(rest)


def _text(argument: str) -> str:
    """A prompt from the command line: itself, @FILE or - for standard input."""
    if argument == "-":
        return sys.stdin.read()
    if argument.startswith("@"):
        try:
            return Path(argument[1:]).read_text()
        except OSError as error:
            raise SetupError(f"{argument[1:]}: {error.strerror}", 2) from None
    return argument


def _flat(data: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def table(rows: Iterable[Iterable[Any]]) -> None:
    """Print rows in aligned columns."""
    cells = [[f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
