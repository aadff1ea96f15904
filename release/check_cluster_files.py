"""Check files of KubeRay and LeaderWorkerSet against the schemas of these operators, without a network.

    python release/check_cluster_files.py examples/multi_node/kuberay.yaml ...
    python release/check_cluster_files.py --cut DEFINITION KubeRay v1.7.0   # a newer schema into release/schemas

A schema is the operator's definition of its resource (Apache-2.0), without descriptions and pod templates, which take
most of its length. kubernetes-validate checks the pod templates, as pods. `make check-deployment` calls this.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import ValidationError, validate

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.35"
POD_TEMPLATE = {"$comment": "pod template"}


def cut(schema: Any) -> Any:
    """Return the schema without descriptions and pod templates. It refuses fields that it does not name."""
    if isinstance(schema, list):
        return [cut(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties", {})
    if "containers" in properties.get("spec", {}).get("properties", {}):
        return POD_TEMPLATE
    # A property may be named "description", too; it is no string.
    shorter = {key: cut(value) for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    if "properties" in schema and schema.get("type") == "object":
        shorter["additionalProperties"] = False
    return shorter


def write_schema(definition: dict[str, Any], operator: str, version: str) -> None:
    names = definition["spec"]["names"]
    stored = next(item for item in definition["spec"]["versions"] if item["storage"])
    schema = cut(stored["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    schema["$comment"] = (
        f"{names['kind']} of {operator} {version}, under the Apache License 2.0; "
        "shortened by release/check_cluster_files.py"
    )
    SCHEMAS.joinpath(f"{names['kind']}-{stored['name']}.json").write_text(json.dumps(schema) + "\n")


def pod_templates(schema: Any, value: Any) -> list[Any]:
    """Return the parts of the value that the schema has as pod templates."""
    if schema == POD_TEMPLATE:
        return [value]
    if isinstance(value, list):
        return [template for item in value for template in pod_templates(schema.get("items", {}), item)]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return [found for key, item in value.items() for found in pod_templates(properties.get(key, {}), item)]
    return []


def check(path: str) -> str:
    """Return a line about the file, which begins with its path.

    Raises:
        SystemExit: a field is unknown, missing or of the wrong type.
    """
    resource = yaml.safe_load(Path(path).read_text())
    version = resource["apiVersion"].partition("/")[2]
    schema = json.loads(SCHEMAS.joinpath(f"{resource['kind']}-{version}.json").read_text())
    found = Draft202012Validator(schema).iter_errors(resource)
    errors = [f"{path}: {error.json_path}: {error.message}" for error in found]
    templates = pod_templates(schema, resource)
    for number, template in enumerate(templates):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        try:
            validate(pod, KUBERNETES, strict=True)
        except ValidationError as error:
            errors.append(f"{path}: pod template {number}: {'.'.join(map(str, error.path))}: {error.message}")
    if errors:
        sys.exit("\n".join(errors))
    return f"{path} fits {resource['kind']} {resource['apiVersion']}, its {len(templates)} pod templates included"


if sys.argv[1] == "--cut":
    write_schema(yaml.safe_load(Path(sys.argv[2]).read_text()), *sys.argv[3:])
else:
    for argument in sys.argv[1:]:
        print(check(argument))
