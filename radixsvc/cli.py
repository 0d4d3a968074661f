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

    def remote(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        added = command(name, run, text)
        added.add_argument("--url", help="default: $RADIXSVC_URL or http://127.0.0.1:8011")
        added.add_argument("--api-key", help="default: $RADIXSVC_API_KEY")
        added.add_argument("--json", action="store_true", help="for programs")
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
    for name, run, text in (
        ("chat", _chat, "talk to the model"),
        ("generate", _generate, "complete a text"),
    ):
        added = remote(name, run, text)
        added.add_argument("--max-tokens", type=int, default=512)
        added.add_argument("--temperature", type=float, default=0.2)
        added.add_argument("--seed", type=int)
        if name == "chat":
            added.add_argument("--system", help="a system message")
        else:
            added.add_argument("prompt", help="the text, @FILE, or - for standard input")
    remote("stats", _stats, "what the service is doing")
    remote("tree", _tree, "the cached prefixes")
    for name, text in (
        ("explain", "why a prompt is not cached any further"),
        ("warm", "compute a prompt's keys and values now"),
    ):
        added = remote(name, _prefix, text)
        added.set_defaults(action=name)
        added.add_argument("prompt", help="the text, @FILE, or - for standard input")
    bench = commands.add_parser("bench", help="measure", description="Measure one of these.")
    benches = bench.add_subparsers(required=True, metavar="NAME")
    for file in sorted((Path(__file__).parent / "bench").glob("[a-z]*.py")):
        if "def add_arguments(" in file.read_text():
            under, run = (commands, _tool) if file.stem in TOOLS else (benches, _bench)
            added = under.add_parser(
                file.stem, add_help=False, prefix_chars="\0", help=TOOLS.get(file.stem)
            )
            added.add_argument("rest", nargs=argparse.REMAINDER)
            added.set_defaults(run=run, name=file.stem)
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


def _client(args: argparse.Namespace) -> Client:
    return Client(args.url, args.api_key)


def _chat(args: argparse.Namespace) -> int:
    from radixsvc.chat import chat

    with _client(args) as client:
        client.get("/v1/models")
        return chat(client, args.system, **_sampling(args))


def _generate(args: argparse.Namespace) -> int:
    with _client(args) as client:
        answer = client.complete(_text(args.prompt), **_sampling(args))
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        print(answer.choices[0].text)
    return 0


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    return {name: value for name, value in options.items() if value is not None}


def _stats(args: argparse.Namespace) -> int:
    with _client(args) as client:
        return _show(args, client.get("/v1/stats"))


def _tree(args: argparse.Namespace) -> int:
    with _client(args) as client:
        found = client.get("/v1/tree")
    if args.json:
        return _show(args, found)
    print(found["text"])
    return 0


def _prefix(args: argparse.Namespace) -> int:
    with _client(args) as client:
        if args.action == "warm":
            return _show(args, client.prefix("warm", prompt=_text(args.prompt)))
        found = client.explain(prompt=_text(args.prompt))
    if args.json:
        return _show(args, msgspec.to_builtins(found))
    print(found.summary)
    if found.divergence is not None:
        table(
            (name, repr(text))
            for name, text in (
                ("before", found.divergence.text_before),
                ("this prompt", found.divergence.prompt_text),
                ("the cached one", found.divergence.cached_text),
            )
        )
    return 0


def _bench(args: argparse.Namespace) -> int:
    from radixsvc.bench.report import print_metrics

    module = importlib.import_module(f"radixsvc.bench.{args.name}")
    parser = argparse.ArgumentParser(prog=f"radixsvc bench {args.name}", description=module.__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    module.add_arguments(parser)
    parsed = parser.parse_args(args.rest)
    print_metrics(module.run(parsed), parsed.json)
    return 0


def _tool(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"radixsvc.bench.{args.name}")
    parser = argparse.ArgumentParser(
        prog=f"radixsvc {args.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(args.rest))
    return code


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


def _show(args: argparse.Namespace, data: dict[str, Any]) -> int:
    if args.json:
        print(msgspec.json.encode(data).decode())
    else:
        table(_flat(data))
    return 0


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
