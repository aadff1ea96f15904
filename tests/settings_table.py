"""The settings in `docs/settings.md`, from the dataclasses that define them.

`python tests/settings_table.py` writes the document.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

from moeserve.config.descriptions import default_of
from moeserve.config.settings import Settings
from moeserve.config.validation import allowed_values
from moeserve.server.settings import RouterSettings, ServerSettings

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Each setting is an argument of `LLM` and `AsyncLLM`, and a flag of `moeserve serve`, `generate` and `chat`
(`--max-model-len 32k`; `--no-NAME` turns off what is on). Flags precede variables, and variables a YAML file.

```yaml
# settings.yaml
model: /models/mixtral
port: 9000
data_parallel_size: 2
api_key: [first-key, second-key]
speculative_config: {method: ngram, num_speculative_tokens: 4}
```

```bash
MOESERVE_MAX_WAITING=64 moeserve serve --config settings.yaml --port 8001
```

`MOESERVE_CONFIG` names the file too. In a variable, lists are separated by commas or JSON.
`moeserve --print-completion bash` (extra `completion`) prints a script that completes flags and values. `LLM.config`
has the values that an engine has chosen for what was `None` or `auto`.

Written by `python tests/settings_table.py`.
"""


def document() -> str:
    groups = [*Settings.groups().values(), ServerSettings, RouterSettings]
    return HEAD + "".join(map(section, groups))


def section(group: type) -> str:
    """Return the heading and the table of a group of settings."""
    hints = get_type_hints(group, include_extras=True)
    lines = [row(field, hints[field.name]) for field in dataclasses.fields(group)]
    return f"\n## {group.__doc__}\n\n| setting | default | meaning |\n|---|---|---|\n" + "".join(lines)


def row(field: dataclasses.Field[Any], hint: Any) -> str:
    default = default_of(field)
    shown = "required" if default is dataclasses.MISSING else f"`{default!r}`"
    help = field.metadata["help"]
    names = re.findall(r"'(.*?)'", allowed_values(hint))
    unmentioned = [name for name in names if name != default and not re.search(rf"\b{name}\b", help)]
    cells = (f"`{field.name}`", shown, help + (f" ({', '.join(unmentioned)})" if unmentioned else ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
