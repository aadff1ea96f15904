"""Check the list of what is compiled into wheels: its schema, and a licence in the wheel for each entry.

`make dist` calls it with the wheels.
"""

import json
import sys
import zipfile
from pathlib import PurePosixPath

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as wheel:
        names = [PurePosixPath(name) for name in wheel.namelist()]
        (sbom,) = [name for name in names if name.parent.name == "sboms" and name.name == "moeserve.cdx.json"]
        text = wheel.read(str(sbom)).decode()
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        sys.exit(f"{path}: {sbom}: {error.data.message}")
    bom = json.loads(text)
    compiled_in = {component["name"]: component["version"] for component in bom["components"]}
    licences = {name.stem for name in names if name.parent == sbom.parents[1] / "licenses"}
    version = PurePosixPath(path).name.split("-")[1]
    if not all(component["purl"].endswith(component["version"]) for component in bom["components"]):
        sys.exit(f"{path}: {sbom}: a purl without the component's version: {bom['components']}")
    if licences != {"LICENSE", *compiled_in} or bom["metadata"]["component"]["version"] != version:
        sys.exit(f"{path} lists {compiled_in} for version {version}, and has the licences {sorted(licences)}")
    print(f"{path} has compiled in:", *(f"{name} {version}" for name, version in compiled_in.items()))
