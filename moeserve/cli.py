"""The command line. Flags come from the settings; each subcommand is a few lines that call a room below."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec

import moeserve
from moeserve.bench import commands as benchmarks
from moeserve.config.settings import Settings
from moeserve.errors import MoeserveError, SettingsError, nearest
from moeserve.launch import DEFAULT_PORT
from moeserve.planner.costs import Assumptions
from moeserve.planner.hardware import TABLE
from moeserve.planner.simulation_settings import ExpertSettings, SimulationSettings
from moeserve.sampling_params import SamplingParams

GPUS_PER_NODE = 8


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 for an error that was explained, 2 for a wrong command line."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    command: Parser = options.parser
    if unknown:
        command.refuse(unknown[0])
    if options.run is generate and not any(options.prompt or []):
        command.error("--prompt is missing: what to ask")
    if options.run is generate and options.model_folder is not None and "model" in options:
        command.error(f"MODEL={options.model_folder} and --model={options.model} are both given; give one")
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        return int(options.run(options) or 0)
    except MoeserveError as error:
        if options.verbose:
            logging.exception("failed")
        print(f"moeserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def generate(options: argparse.Namespace) -> None:
    """Stream the answer to a prompt."""
    settings = _given(options, *Settings.groups().values())
    if options.model_folder is not None:
        settings["model"] = options.model_folder
    sampling = _given(options, SamplingParams)
    SamplingParams(**sampling)  # refuses what is wrong before a model is loaded
    with moeserve.LLM(**settings) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), **sampling)
        for prompt in options.prompt:
            text_shown = 0
            as_message = llm.has_chat_template and not options.raw
            messages, arguments = [{"role": "user", "content": prompt}], options.chat_template_kwargs
            asked = llm.chat_prompt(messages, chat_template_kwargs=arguments) if as_message else prompt
            for output in llm.stream(asked, params):
                text = output.outputs[0].text
                print(text[text_shown:], end="", flush=True)
                text_shown = len(text)
            print()


def upcycle(options: argparse.Namespace) -> None:
    """Turn a dense Llama-style checkpoint into a Mixtral one."""
    from moeserve.models import upcycle as room

    room.upcycle(
        options.dense,
        options.out,
        num_experts=options.experts,
        top_k=options.top_k,
        mode=options.mode,
        dtype=options.dtype,
        seed=options.seed,
    )
    print(options.out)


def inspect(options: argparse.Namespace) -> None:
    """Tell what a checkpoint is and what it takes, before any of it is loaded."""
    from moeserve.models import inspection as room

    found = room.inspect(options.model, None if options.dtype == "auto" else options.dtype)
    print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else room.as_text(found))


def plan(options: argparse.Namespace) -> None:
    """Print the ways to lay out a checkpoint over a number of ranks, and what they would do on some hardware."""
    from moeserve.planner import estimate, hardware, layout, traffic

    num_ranks, ranks_per_node = _ranks(options)
    for_estimates = {"traffic", "decode_requests", "prefill_tokens", *_given(options, Assumptions)} & {*vars(options)}
    if options.hardware is None and for_estimates:
        flag = min(for_estimates).replace("_", "-")
        raise SettingsError(f"--{flag} is for estimates; say --hardware too")
    assumptions = Assumptions(**_given(options, Assumptions))
    found = layout.find_layouts(
        options.model,
        num_ranks,
        None if options.dtype == "auto" else options.dtype,
        options.tp,
        loads=options.loads,
        num_redundant=options.num_redundant_experts,
        shared_as_routed=options.shared_as_routed,
        num_nodes=num_ranks // ranks_per_node,
        keeps_groups=assumptions.exchange == "node_limited",
    )
    estimates = None
    if options.hardware is not None:
        given = {name: getattr(options, name) for name in ("decode_requests", "prefill_tokens") if name in options}
        estimates = estimate.estimate_layouts(
            found,
            hardware.read_hardware(options.hardware),
            traffic.choose_traffic(getattr(options, "traffic", None)),
            assumptions,
            ranks_per_node=ranks_per_node,
            **given,
        )
    if options.json:
        told = {} if estimates is None else {"estimates": dataclasses.asdict(estimates)}
        print(json.dumps(dataclasses.asdict(found) | told, indent=2))
    else:
        print(layout.as_text(found))
        if estimates is not None:
            print("\n" + estimate.as_text(estimates))


def simulate(options: argparse.Namespace) -> None:
    """Serve recorded traffic on hardware that need not be there, in virtual time, and tell how that went."""
    from moeserve.planner import hardware, traffic
    from moeserve.planner import simulate as room

    num_ranks, ranks_per_node = _ranks(options)
    assumptions, experts = (
        Assumptions(**_given(options, Assumptions)),
        ExpertSettings(**_given(options, ExpertSettings)),
    )
    if assumptions.exchange == "node_limited" and (experts.rebalance, experts.placement) != ("off", "even"):
        raise SettingsError(
            "--exchange node_limited counts on nodes with whole groups of experts, which --rebalance auto and "
            "--placement loads do not keep here; use --exchange by_node"
        )
    found = room.simulate(
        options.model,
        hardware.read_hardware(options.hardware),
        traffic.choose_traffic(options.traffic),
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tp=options.tp,
        dtype=None if options.dtype == "auto" else options.dtype,
        loads=options.loads,
        assumptions=assumptions,
        settings=SimulationSettings(**_given(options, SimulationSettings)),
        experts=experts,
    )
    print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else room.as_text(found))


def _ranks(options: argparse.Namespace) -> tuple[int, int]:
    """How many there are, and how many of them are in each node."""
    if (options.ranks is None) == (options.nodes is None):
        raise SettingsError("say either --ranks, for those of one node, or --nodes (and --gpus-per-node, if not 8)")
    if options.ranks is not None:
        if options.gpus_per_node is not None:
            raise SettingsError(
                f"--ranks {options.ranks} are all in one node, so --gpus-per-node {options.gpus_per_node} does not go "
                f"with them; say --nodes instead of --ranks, or leave it out"
            )
        return options.ranks, max(1, options.ranks)
    ranks_per_node = GPUS_PER_NODE if options.gpus_per_node is None else options.gpus_per_node
    if options.nodes < 1 or ranks_per_node < 1:
        raise SettingsError(f"--nodes {options.nodes} and --gpus-per-node {ranks_per_node}: both must be at least 1")
    return options.nodes * ranks_per_node, ranks_per_node


def viz(options: argparse.Namespace) -> None:
    """Show what experts and ranks were given, from records of a run: as a table, a page or a picture."""
    from moeserve.planner import views as room

    num_redundant = options.num_redundant_experts
    print(room.show(options.loads, html_path=options.html, png_path=options.png, num_redundant=num_redundant))


def launch(options: argparse.Namespace) -> int:
    """Make a Ray cluster of several hosts and run a command on it: the same on every host, or once with --hosts."""
    from moeserve import launch as room

    num_nodes = 1 + len(options.hosts) if options.nodes is None else options.nodes
    if num_nodes < 1 or (options.num_cpus is not None and options.num_cpus < 1):
        raise SettingsError(f"--nodes {num_nodes} and --num-cpus {options.num_cpus}: both must be at least 1")
    if options.hosts and num_nodes != 1 + len(options.hosts):
        raise SettingsError(f"--nodes {num_nodes} does not go with {len(options.hosts)} other hosts; leave it out")
    return room.launch(
        room.Launch(
            head=options.head,
            port=options.port,
            num_nodes=num_nodes,
            hosts=options.hosts,
            remote_shell=options.remote_shell,
            interface=options.interface,
            num_cpus=options.num_cpus,
            model=options.model,
            timeout_s=options.timeout,
            command=options.command,
            reads_token=options.token_from_stdin,
        )
    )


def bench(options: argparse.Namespace) -> None:
    """Measure moeserve beside other engines and the machine's limits."""
    benchmarks.run(options.name, options.arguments)


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and answers an unknown flag with the nearest known one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})

    def refuse(self, argument: str) -> NoReturn:
        flag, _, _ = argument.partition("=")
        if not flag.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        names = {name.lstrip("-").replace("-", "_"): name for name in self._option_string_actions}
        answer = nearest(flag.lstrip("-"), names)
        for name in sorted(names, key=len, reverse=True):
            answer = answer.replace(repr(name), names[name])
        self.error(f"unknown flag {flag}: {answer}")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)


def _parser() -> Parser:
    parser = Parser(prog="moeserve", description="Inference engine for mixture-of-experts language models.")
    parser.add_argument("--version", action="version", version=f"moeserve {moeserve.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = _add_command(commands, "generate", generate)
    command.add_argument("model_folder", nargs="?", metavar="MODEL", help="same as --model")
    command.add_argument("--prompt", action="append", help="what to ask; may be given several times")
    command.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    command.add_argument(
        "--chat-template-kwargs",
        type=_reader(dict[str, Any]),
        metavar="JSON",
        help="""what else the chat template is told, such as '{"enable_thinking": false}'""",
    )
    sampling = command.add_argument_group("Sampling", "Defaults are those of the checkpoint's generation_config.json.")
    sampling.add_argument(
        "--max-tokens", type=int, default=256, metavar="TOKENS", help="most tokens to generate (default: 256)"
    )
    # One text is shown, so one output; --seed is the engine's.
    shown_elsewhere = {"max_tokens", "n", "logprobs", "prompt_logprobs", "seed"}
    _add_flags(sampling, SamplingParams, without=shown_elsewhere)
    for settings in Settings.groups().values():
        _add_flags(command.add_argument_group(settings.__doc__), settings)

    command = _add_command(commands, "inspect", inspect)
    command.add_argument("model", type=Path, metavar="MODEL", help="folder of a checkpoint; it need not hold weights")
    _add_counted_dtype(command)
    command.add_argument("--json", action="store_true", help="print JSON, with bytes as numbers")

    command = _add_command(commands, "plan", plan)
    _add_cluster(command)
    command.add_argument(
        "--tp", type=_reader(int), help="show only the layout with this tp, all its ranks and formulas"
    )
    group = command.add_argument_group("Placement of experts")
    group.add_argument(
        "--num-redundant-experts",
        type=_reader(int),
        default=0,
        metavar="SLOTS",
        help="slots beyond one for each expert, over all ranks together (default: 0)",
    )
    group.add_argument(
        "--shared-as-routed",
        action="store_true",
        help="place shared experts as experts that every token chooses, with copies; otherwise every rank has them",
    )
    group = command.add_argument_group("Estimates", "Made when --hardware is given.")
    group.add_argument("--hardware", metavar="NAME", help=f"{', '.join(TABLE)}, or a .json file that describes it")
    group.add_argument(
        "--traffic",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="lengths of requests: a .jsonl file of Mooncake's or a .csv file of Azure's format, or PROMPT:OUTPUT in "
        "tokens (default: 200 requests of Mooncake's conversations)",
    )
    group.add_argument(
        "--decode-requests",
        type=_reader(int),
        default=argparse.SUPPRESS,
        metavar="REQUESTS",
        help="that each replica decodes at once, if its cache holds so many (default: 128)",
    )
    group.add_argument(
        "--prefill-tokens",
        type=_reader(int),
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="of prompts, that each replica computes in a step (default: 4096)",
    )
    _add_flags(command.add_argument_group(Assumptions.__doc__), Assumptions)

    command = _add_command(commands, "simulate", simulate)
    _add_cluster(command)
    command.add_argument("--tp", type=_reader(int), default=1, help="ranks of each replica (default: 1)")
    command.add_argument(
        "--hardware", required=True, metavar="NAME", help=f"{', '.join(TABLE)}, or a .json file that describes it"
    )
    command.add_argument(
        "--traffic",
        metavar="FILE",
        help="requests: a .jsonl file of Mooncake's or a .csv file of Azure's format, or PROMPT:OUTPUT for one alone "
        "(default: 200 requests of Mooncake's conversations)",
    )
    for settings in (SimulationSettings, ExpertSettings, Assumptions):
        _add_flags(command.add_argument_group(settings.__doc__), settings)

    command = _add_command(commands, "viz", viz)
    command.add_argument("loads", type=Path, metavar="LOADS", help="records of expert load, as an engine writes them")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser, with all details")
    command.add_argument(
        "--png", type=Path, metavar="FILE", help="write a picture of experts and ranks by layer, and of ranks over time"
    )
    command.add_argument(
        "--num-redundant-experts",
        type=_reader(Annotated[int, msgspec.Meta(ge=0, le=2**20)]),
        metavar="EXPERTS",
        help="also show how even ranks would be with experts placed by these loads, and so many redundant ones in each "
        "layer (default: it is not shown)",
    )

    command = _add_command(commands, "upcycle", upcycle)
    command.add_argument("dense", type=Path, metavar="DENSE", help="a GGUF file, or a folder with safetensors")
    command.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    command.add_argument("--experts", type=int, default=4, help="experts in each layer (default: 4)")
    command.add_argument("--top-k", type=int, help="experts per token (default: 2, or all of them in split mode)")
    command.add_argument(
        "--mode",
        choices=["replicate", "split"],
        default="replicate",
        help="replicate: each expert a copy of the dense network, behind a random router; "
        "split: the network's neurons divided among the experts, all of them chosen (default: replicate)",
    )
    command.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="number format to write; auto: the dense checkpoint's, float32 for GGUF",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the random router (default: 0)")

    command = _add_command(commands, "launch", launch)
    command.add_argument("--head", metavar="ADDRESS", help="address of the first host, as the others reach it")
    command.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of Ray on the first host (default: {DEFAULT_PORT})"
    )
    command.add_argument("--nodes", type=int, help="how many hosts there are (default: those of --hosts, and this)")
    command.add_argument(
        "--hosts", nargs="+", default=[], metavar="HOST", help="the other hosts: the command is started there from here"
    )
    command.add_argument(
        "--remote-shell",
        default="ssh -o BatchMode=yes",
        metavar="COMMAND",
        help="with --hosts: what runs a command on a host (default: ssh -o BatchMode=yes)",
    )
    command.add_argument("--interface", help="network interface by name (eth1) or subnet (10.1.0.0/16)")
    command.add_argument("--num-cpus", type=int, help="cores for ranks on this host (default: those it may use)")
    command.add_argument("--model", help="folder of a checkpoint that every host must be able to read")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for hosts (default: 60)")
    command.add_argument("--token-from-stdin", action="store_true", help=argparse.SUPPRESS)
    command.add_argument(
        "command", nargs="*", metavar="-- COMMAND", help="runs on the first host; none: the cluster stays up"
    )

    command = _add_command(commands, "bench", bench)
    command.add_argument("name", choices=get_args(benchmarks.CommandName))
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own; `moeserve bench NAME --help` shows them"
    )
    return parser


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int | None]) -> Parser:
    command: Parser = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.set_defaults(run=run, parser=command)
    command.add_argument("--verbose", "-v", action="store_true", help="log what the engine does")
    return command


def _add_cluster(command: argparse.ArgumentParser) -> None:
    """What is planned or simulated, and on how many ranks."""
    command.add_argument("model", type=Path, metavar="MODEL", help="folder of a checkpoint; it need not hold weights")
    command.add_argument("--ranks", type=_reader(int), help="how many ranks there are, at most 4096, all in one node")
    command.add_argument("--nodes", type=_reader(int), help="instead of --ranks: how many nodes there are")
    command.add_argument(
        "--gpus-per-node", type=_reader(int), help=f"with --nodes: ranks of each (default: {GPUS_PER_NODE})"
    )
    command.add_argument(
        "--loads",
        type=Path,
        metavar="FILE",
        help="how many tokens each expert gets: JSON, or the .jsonl of expert_load_file",
    )
    _add_counted_dtype(command)
    command.add_argument("--json", action="store_true", help="print JSON, with bytes and seconds as numbers")


def _add_counted_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="number format to count memory for; auto: the checkpoint's (default: auto)",
    )


def _add_flags(group: Any, settings: type, without: Iterable[str] = ()) -> None:
    """One flag for each field of a dataclass; a flag that is not given leaves the default alone."""
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        if field.name in without:
            continue
        has_plain_default = field.default is not dataclasses.MISSING and field.default is not None
        # The defaults of sampling are the checkpoint's, where its generation_config.json has them.
        shown = f" (default: {field.default})" if has_plain_default and settings is not SamplingParams else ""
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{field.metadata['help']}{shown}"}
        expected = hints[field.name]
        if expected is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(expected) is Literal:
            options["choices"] = get_args(expected)
        elif "list" in str(expected):
            is_ids = "int" in str(expected)
            options |= {"action": "append", "type": int if is_ids else str, "metavar": "ID" if is_ids else "TEXT"}
            options["help"] += "; may be given several times"
        else:
            options |= {"type": _reader(expected), "metavar": field.name.rpartition("_")[2].upper()}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _reader(expected: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return msgspec.convert(json.loads(text) if text.startswith("{") else text, expected, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return read


def _given(options: argparse.Namespace, *groups: type) -> dict[str, Any]:
    """What the command line says for the fields of these dataclasses."""
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    return {name: value for name, value in vars(options).items() if name in names}
