"""The command line: the same functions as the notebook's, without a screen."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from workbench.cli import commands
from workbench.cli.options import spec_options
from workbench.cli.tune import tune as tune_command
from workbench.errors import DeviceBusy, InvalidInput

BAD_INPUT, BUSY, INTERRUPTED = 2, 3, 130
# typer brings its own copy of click from 0.16 on: the base class of usage errors is taken from where it is.
UsageProblem: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Commands(TyperGroup):
    """Turns every expected error into one sentence on standard error and an exit status, with no traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command. Exit status 2 for bad input, 3 for a device that is held, 130 for an interrupt."""
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except UsageProblem as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(str(error), err=True)
                code = BAD_INPUT
            else:
                text = str(getattr(error, "format_message", error.__str__)())  # unlike str(error) it names the option
                code = _say(f"{text.rstrip('.')}; --help lists what there is", BAD_INPUT)
        except InvalidInput as error:
            code = _say(str(error), BAD_INPUT)
        except DeviceBusy as error:
            code = _say(str(error), BUSY)
        except (KeyboardInterrupt, typer.Abort):
            code = _say("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader of a pipe went away
            sys.stderr.close()
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


def _say(text: str, code: int) -> int:
    typer.echo(" ".join(text.split()), err=True)
    return code


app = typer.Typer(
    name="workbench",
    cls=Commands,
    help="Choose how a Mixture-of-Experts layer or a whole model is run: time it, check it, compare it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("modes")(spec_options(commands.modes))
app.command("run")(spec_options(commands.run_point))
app.command("profile")(spec_options(commands.profile))
app.command("sweep")(spec_options(commands.run_sweep))
app.command("show")(commands.show)
app.command("export")(commands.export)
app.command("env")(commands.env)
app.command("tune")(tune_command)
app.command("lab")(commands.lab)


def main() -> None:
    """Entry point of the command `workbench`."""
    app()
