"""`hf-psd`: the command line, a registry of subcommands."""

from __future__ import annotations

import argparse
from importlib import import_module

COMMANDS = {
    "bench": "hf_psd.bench.command",
    "explain": "hf_psd.explain_command",
    "export-hub": "hf_psd.export",
}
"""Module of each subcommand. Its docstring's first line is the help; it has `add_arguments(parser)` and
`run(parsed)`, whose return value, if any, is the exit status."""


def main(arguments: list[str] | None = None) -> int | None:
    """Parses the command line and runs the subcommand."""
    parser = argparse.ArgumentParser(prog="hf-psd", description="Speculative decoding for whole batches.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, path in COMMANDS.items():
        module = import_module(path)
        about = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, OSError) as error:
        parser.exit(2, f"hf-psd: error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
