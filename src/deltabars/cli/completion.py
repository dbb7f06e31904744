"""`deltabars completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from deltabars.cli.options import program

_DESCRIPTION = """\
Print a script for bash or zsh that completes the commands of deltabars, their options and the
values of these.
"""
_EPILOG = """\
examples:
  eval "$(deltabars completion bash)"          # in ~/.bashrc
  eval "$(deltabars completion zsh)"           # in ~/.zshrc
"""
_BASH = """\
_deltabars() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" known=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if [ -z "$known" ]; then
        case "$word" in -*) ;; *) COMPREPLY=(); return ;; esac
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o bashdefault -o default -F _deltabars deltabars
"""
_ZSH = """\
autoload -Uz compinit && compinit
autoload -Uz bashcompinit && bashcompinit
"""


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "completion",
        help="a script with which bash or zsh completes commands and options",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(
        run=lambda options: print(script(options.shell, commands.choices), end=""), python=python
    )


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script of a shell for these commands."""
    values, options = [], []
    for name, parser in commands.items():
        flags = [action for action in parser._actions if action.option_strings]
        words = " ".join(flag for action in flags for flag in action.option_strings)
        options.append(f'            {name}) known="{words}" ;;')
        for action in parser._actions:
            if action.choices:
                befores = action.option_strings or [name]  # a first argument, after the command
                patterns = "|".join(f'"{name} {before}"' for before in befores)
                known = " ".join(str(choice) for choice in action.choices)
                values.append(f'        {patterns}) known="{known}" ;;')
    text = _BASH.format(
        commands=" ".join(commands), values="\n".join(values), options="\n".join(options)
    )
    return (_ZSH if shell == "zsh" else "") + text


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    return program(
        "from deltabars.cli.entry import make_parser",
        "from deltabars.cli.completion import script",
        "\nparser, commands = make_parser()",
        f"print(script({options.shell!r}, commands), end='')",
    )
