"""What a shell is offered at each place of a command line, by the machinery that README names."""

import pathlib
import re

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from jaxpaged.cli import main

VARIABLE = "_JAXPAGED_COMPLETE"
README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def offered(*words: str, incomplete: str = "") -> list[str]:
    shell = ShellComplete(main, {}, "jaxpaged", VARIABLE)
    return [item.value for item in shell.get_completions(list(words), incomplete)]


def kinds(*words: str, incomplete: str = "") -> set[str]:
    shell = ShellComplete(main, {}, "jaxpaged", VARIABLE)
    return {item.type for item in shell.get_completions(list(words), incomplete)}


def test_every_command_is_offered():
    assert sorted(offered()) == sorted(main.commands)
    assert sorted(offered(incomplete="v")) == ["validate", "verify", "version"]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_option_of_a_command_is_offered(command):
    names = {name for param in main.commands[command].params for name in param.opts}
    options = {name for name in names if name.startswith("--")}

    assert set(offered(command, incomplete="--")) == options | {"--help"}


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_job_file_is_completed_as_a_path(command):
    assert kinds(command, incomplete="jo") == {"file"}


@pytest.mark.parametrize(
    "words", [["status"], ["verify"], ["retry"], ["diff", "out/a"], ["compare"]], ids=" ".join
)
def test_an_output_is_completed_as_a_folder(words):
    assert kinds(*words, incomplete="ou") == {"dir"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_its_script_as_readme_says(shell):
    assert re.search(rf"{VARIABLE}={shell}_source jaxpaged\b", README)

    result = CliRunner().invoke(main, prog_name="jaxpaged", env={VARIABLE: f"{shell}_source"})

    assert result.exit_code == 0
    assert f"{VARIABLE}={shell}_complete" in result.stdout


def test_bash_is_answered_word_by_word():
    words = {"COMP_WORDS": "jaxpaged val", "COMP_CWORD": "1", VARIABLE: "bash_complete"}

    result = CliRunner().invoke(main, prog_name="jaxpaged", env=words)

    assert result.stdout == "plain,validate\n"
