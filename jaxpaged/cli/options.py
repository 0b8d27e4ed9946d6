"""Options and arguments that several commands have."""

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

OVERRIDE = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a key of the job file, as in sampling.max_tokens=64, as if the file said so: "
    "the value is YAML, and a relative path is relative to the file. May be repeated.",
)

STORAGE = click.option(
    "--storage",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="How to reach s3:// and gs://, as the job file's section storage: "
    "s3.endpoint_url=http://localhost:9000. May be repeated.",
)

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")

LOG_FORMAT = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What progress and errors on stderr are: text for people, or one JSON object a line.",
)

METRICS_PORT = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve live metrics for Prometheus on this port while the job runs; 0 takes a free one.",
)

METRICS_HOST = click.option(
    "--metrics-host",
    help="The address to serve them on, by default 127.0.0.1; 0.0.0.0 shows them to everyone who "
    "reaches this machine.",
)


def _complete_folder(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Lets the shell complete an output: a folder's path, though it may be a URL, too."""
    return [CompletionItem(incomplete, type="dir")]


def output(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """The argument that names an output, which need not be there."""
    return click.argument(name, shell_complete=_complete_folder)
