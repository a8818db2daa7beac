"""The command `penstock`."""

import typer

from cli import bench

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The pipe between inference server and trainer in LLM reinforcement learning.",
)
app.command("bench")(bench.bench)


@app.callback()
def callback() -> None:
    """Keeps `penstock bench` a sub-command while it is the only one."""


def main() -> None:
    app()
