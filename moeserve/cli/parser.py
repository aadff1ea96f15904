"""Argument parsing shared by the subcommands: flags made from dataclasses, and errors for unknown flags."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from moeserve.config.settings import CacheDtypeName, ModelSettings, PositiveInt, Settings
from moeserve.config.validation import convert, read_json_text
from moeserve.config.vllm_names import VllmSettings
from moeserve.config.vllm_options import SETTINGS, SWITCHES, own_value, refusal
from moeserve.errors import SettingsError, nearest

if TYPE_CHECKING:
    from moeserve.models.checkpoint.model_files import ModelFiles

GPUS_PER_NODE = 8
# A setting in a text, maybe with its value. Parts of paths, attributes, calls and quoted texts are no settings.
_VALUE = r"""'[^']*'|"[^"]*"|\[[\d, ]*\]|\{[^}]*\}|[\w+-]+(?:\.\w+)*"""
_SETTING = re.compile(rf"""(?<![\w./'"-])(?P<name>[a-z]\w+)(?:=(?P<value>{_VALUE}))?(?![\w/=(])""")
_END_OF_FILE_NAME = re.compile(r"\.[a-z]+: $")
_SWITCHES = {"True": "--", "False": "--no-"}
_QUOTES = "'\""


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviations, and suggests the nearest known flag for an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})
        self.settings: list[type] = []  # dataclasses of the settings that the command has
        self.arrange: Callable[[argparse.Namespace, list[str]], list[str]] = _leave  # called with options and the rest

    def add_settings(self, *groups: type) -> None:
        """Add each dataclass of settings under its own title. Settings are flags, environment variables and keys of a
        file.

        Settings that are not given are absent from the parsed options.
        """
        for group in groups:
            add_flags(self.add_argument_group(group.__doc__), group)
        self.settings += groups

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Return the options and the arguments that are left over, both as `arrange` has changed them."""
        parsed, rest = super().parse_known_args(*arguments, **options)
        return parsed, self.arrange(parsed, rest)

    def refuse(self, argument: str) -> NoReturn:
        """Exit with an error for an argument that no flag accepts."""
        flag, _, _ = argument.partition("=")
        if not flag.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        flags = {
            name.lstrip("-"): name
            for name in self._option_string_actions
            if flag.startswith("--no-") or not name.startswith("--no-")
        }
        self.error(f"unknown flag {flag}: {nearest(flag.lstrip('-'), flags, shown_as=flags, otherwise='see --help')}")

    def as_flags(self, text: str) -> str:
        """Return a text in which settings are written as flags: `--dtype float32` for `dtype='float32'`.

        Names of a single word are left as they are unless a value follows, because most are words of English, too.
        Names that follow the name of a file are keys of that file.
        """
        flag_of_name = {
            flag[2:].replace("-", "_"): flag for flag in self._option_string_actions if flag.startswith("--")
        }

        def as_flag(match: re.Match[str]) -> str:
            name, value = match["name"], match["value"]
            flag = flag_of_name.get(name)
            if flag is None or _END_OF_FILE_NAME.search(text[: match.start()]):
                return match[0]
            if value is None:
                return flag if "_" in name else name
            if isinstance(self._option_string_actions[flag], argparse.BooleanOptionalAction) and value in _SWITCHES:
                return flag.replace("--", _SWITCHES[value], 1)
            if value.startswith("["):
                value = value[1:-1].replace(" ", "")
            return f"{flag} {value if ' ' in value else value.strip(_QUOTES)}"

        return _SETTING.sub(as_flag, text)

    def format_help(self) -> str:
        """Return the help, in which settings are written as flags."""
        for action in self._actions:
            if action.help not in (None, argparse.SUPPRESS):
                action.help = self.as_flags(str(action.help))
        return super().format_help()


def _leave(options: argparse.Namespace, rest: list[str]) -> list[str]:
    return rest


class _Formatter(argparse.HelpFormatter):
    """Formats help to the width of the terminal, with a wider column for flags than argparse's default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)


SHORT_FLAGS = {  # as in vLLM
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
}
# Flags with one or more values, as in vLLM.
SEVERAL_VALUES = frozenset(
    ["served_model_name", "cuda_graph_sizes", "cudagraph_capture_sizes", "allowed_media_domains", "ignore_patterns"]
)


def add_flags(group: Any, settings: type, without: Iterable[str] = (), *, shows_defaults: bool = True) -> None:
    """Add one flag for each field of a dataclass. Flags that are not given are absent from the parsed options."""
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        if field.name in without:
            continue
        expected = hints[field.name]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if expected in (bool, bool | None):
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(expected) is Literal:
            options |= {"choices": get_args(expected), "metavar": _metavar(field.name)}
            options["type"] = functools.partial(own_value, field.name)
            options["help"] += f" [{', '.join(get_args(expected))}]"
        elif expected in (list[int], list[PositiveInt] | None):
            options |= {"action": "extend", "type": reader(list[int]), "metavar": "N[,N...]"}
        elif "list" in str(expected):
            options |= {"action": "append", "type": reader(str), "metavar": "TEXT"}
            if field.name in SEVERAL_VALUES:
                options["nargs"] = "+"
            options["help"] += "; may be given several times"
        else:
            options |= {"type": reader(expected, field.name), "metavar": _metavar(field.name)}
        if shows_defaults and field.default is not dataclasses.MISSING and field.default is not None:
            options["help"] += f" (default: {field.default})"
        options["help"] = options["help"].replace("%", "%%")
        short = [SHORT_FLAGS[field.name]] if field.name in SHORT_FLAGS else []
        group.add_argument(*short, f"--{field.name.replace('_', '-')}", **options)


class _VllmFlag(argparse.Action):
    """A setting of vLLM that does not exist here. A value that would change something is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = not str(option_string).startswith("--no-") if self.nargs == 0 else values
        if (reason := refusal(SETTINGS, self.dest, value)) is not None:
            raise argparse.ArgumentError(self, reason)
        setattr(namespace, self.dest, value)


def add_vllm_flags(parser: argparse.ArgumentParser, without: Set[str] = frozenset()) -> None:
    """Add the settings of vLLM that do not exist here, without help, unless the parser has such flags."""
    for name in sorted(SETTINGS.keys() - without):
        flag = f"--{name.replace('_', '-')}"
        if flag in parser._option_string_actions:
            continue
        options: dict[str, Any] = {"type": _json_or_text, "nargs": "+" if name in SEVERAL_VALUES else None}
        flags = [flag]
        if name in SWITCHES:
            options = {"nargs": 0}
            flags.append(f"--no-{flag[2:]}")
        parser.add_argument(
            *flags, dest=name, action=_VllmFlag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
        )


def _json_or_text(text: str) -> Any:
    try:
        return read_json_text(text)
    except ValueError:
        return None if text == "None" else text


def add_engine_flags(command: Parser) -> None:
    """Add the model as an argument, and the settings of the engine with their names in vLLM."""
    command.add_argument("model_folder", nargs="?", metavar="MODEL", help="the same as --model")
    command.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings: the names of flags and their values; the command line and the environment "
        "variables MOESERVE_<NAME> take precedence",
    )
    command.add_settings(*Settings.groups().values(), VllmSettings)
    add_vllm_flags(command)


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given (see `add_engine_flags`)."""
    return given(options, *Settings.groups().values(), VllmSettings)


def _metavar(name: str) -> str:
    return name.rpartition("_")[2].upper()


def reader(expected: Any, name: str = "") -> Callable[[str], Any]:
    """Return a function for argparse that converts a flag's text to a type. Commas separate the entries of a list.

    Args:
        name: the setting, if vLLM writes some of its values differently.
    """

    def read(text: str) -> Any:
        try:
            if get_origin(expected) is list:
                return [convert(each, *get_args(expected), strict=False) for each in text.split(",")]
            value = read_json_text(text) if text.startswith("{") else own_value(name, text)
            return convert(value, expected, strict=False)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return read


def given(options: argparse.Namespace, *groups: type) -> dict[str, Any]:
    """Return the options that were given for the fields of these dataclasses."""
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    return {name: value for name, value in vars(options).items() if name in names}


def add_dtype(command: Parser, help: str) -> None:
    """Add --dtype, whose default is the checkpoint's number format."""
    choices = ["auto", "float32", "bfloat16", "float16"]
    command.add_argument(
        "--dtype", choices=choices, default="auto", metavar="DTYPE", help=f"{help} [{', '.join(choices)}]"
    )


def add_kv_cache_dtype(command: Parser) -> None:
    """Add --kv-cache-dtype."""
    choices = get_args(CacheDtypeName)
    help = "number format of the KV cache; auto: that of --dtype"
    command.add_argument(
        "--kv-cache-dtype", choices=choices, default="auto", metavar="DTYPE", help=f"{help} [{', '.join(choices)}]"
    )


def add_model(command: Parser) -> None:
    """Add the argument for a model whose weights are not read, and the flags for models in a hub."""
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="checkpoint folder, GGUF file, or OWNER/NAME in a hub; weights are not needed; none: the default model",
    )
    add_hub(command)


def add_hub(command: Parser) -> None:
    """Add the flags for models in a hub."""
    for name in ("revision", "download_dir"):
        help = next(field.metadata["help"] for field in dataclasses.fields(ModelSettings) if field.name == name)
        command.add_argument(f"--{name.replace('_', '-')}", metavar=_metavar(name), help=help)


def files_of(options: argparse.Namespace) -> ModelFiles:
    """Return the files of the model that `add_model` reads.

    If no model is given, set `options.model` to the default model.
    """
    from moeserve.api.default_model import default_model
    from moeserve.models.checkpoint.model_files import find_model  # imports torch

    if options.model is None:
        options.model = str(default_model())
    return find_model(options.model, revision=options.revision, download_dir=options.download_dir)


def add_overrides(command: Parser) -> None:
    """Add --hf-overrides."""
    command.add_argument(
        "--hf-overrides",
        type=reader(dict[str, Any] | None),
        metavar="JSON",
        help="changes to config.json before it is read, as a JSON object; objects are merged",
    )


def add_cluster(command: Parser) -> None:
    """Add the flags for the checkpoint and the number of ranks, shared by `plan` and `simulate`."""
    add_model(command)
    command.add_argument("--ranks", type=reader(int), help="number of ranks, at most 4096, all in one node")
    command.add_argument("--nodes", type=reader(int), help="number of nodes; instead of --ranks")
    command.add_argument(
        "--gpus-per-node", type=reader(int), metavar="GPUS", help=f"ranks of each node (default: {GPUS_PER_NODE})"
    )
    add_stages(command)
    command.add_argument(
        "--loads", type=Path, metavar="FILE", help="tokens of each expert: JSON, or the .jsonl of expert_load_file"
    )
    add_dtype(command, "number format of the weights and the KV cache; auto: the checkpoint's")
    add_kv_cache_dtype(command)
    add_overrides(command)
    command.add_argument("--json", action="store_true", help="print JSON, with bytes and seconds as numbers")


def add_stages(command: Parser) -> None:
    """Add the flags for pipeline stages."""
    command.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=reader(PositiveInt),
        default=1,
        metavar="STAGES",
        help="pipeline stages of each replica (default: 1)",
    )
    command.add_argument(
        "--pipeline-layers",
        type=reader(list[PositiveInt]),
        metavar="LAYERS,...",
        help="layers of each stage (default: even shares)",
    )


def cluster_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return the number of ranks, and the number of ranks per node.

    Raises:
        SettingsError: the flags contradict each other.
    """
    if (options.ranks is None) == (options.nodes is None):
        raise SettingsError("give either --ranks, all in one node, or --nodes (and --gpus-per-node, if not 8)")
    if options.ranks is not None:
        if options.gpus_per_node is not None:
            raise SettingsError(
                f"--ranks {options.ranks} are all in one node, which contradicts --gpus-per-node "
                f"{options.gpus_per_node}; use --nodes instead of --ranks, or leave --gpus-per-node out"
            )
        return options.ranks, max(1, options.ranks)
    ranks_per_node = GPUS_PER_NODE if options.gpus_per_node is None else options.gpus_per_node
    if options.nodes < 1 or ranks_per_node < 1:
        raise SettingsError(f"--nodes {options.nodes} and --gpus-per-node {ranks_per_node}: both must be at least 1")
    return options.nodes * ranks_per_node, ranks_per_node
