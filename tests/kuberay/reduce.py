"""Makes `schema.json.gz`, which says what fields a RayCluster and a RayJob may have, from KubeRay's own definitions.

    python tests/kuberay/reduce.py ray.io_rayclusters.yaml ray.io_rayjobs.yaml    # .yaml.gz too

The two files are in `ray-operator/config/crd/bases` of https://github.com/ray-project/kuberay (Apache-2.0). What is
kept of `v1` are names, types, required fields, enumerations, patterns and bounds; status, defaults and words are left
out, and what occurs more than once is kept once. A definition carries no version: these have the fields of KubeRay 1.7.

An API server drops what a definition does not know, without a word (`kubectl apply` warns). So here every object
refuses unknown fields: a misspelled one is found, not dropped.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

OUTPUT = Path(__file__).with_name("schema.json.gz")
_KEPT = ("type", "enum", "required", "pattern", "anyOf", "minimum", "minLength", "maxLength")
_SHORT = 120  # characters of a part that is not worth a name
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def reduced(node: dict[str, Any]) -> dict[str, Any]:
    """A part of a definition as JSON Schema that refuses unknown fields."""
    kept: dict[str, Any] = {key: node[key] for key in _KEPT if key in node}
    if "properties" in node:
        kept["properties"] = {name: reduced(part) for name, part in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(node["additionalProperties"])
    elif node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
        kept["additionalProperties"] = False
    if "items" in node:
        kept["items"] = reduced(node["items"])
    return kept


def named(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same, with each part that occurs more than once under a name of its own."""
    seen: Counter[str] = Counter()

    def count(schema: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(schema, sort_keys=True)
        seen[text] += 1
        return _with_parts(schema, count) if seen[text] == 1 else schema

    names: dict[str, str] = {}
    parts: dict[str, Any] = {}

    def name(schema: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(schema, sort_keys=True)
        if seen[text] == 1 or len(text) <= _SHORT:
            return _with_parts(schema, name)
        if text not in names:
            names[text] = f"p{len(names)}"
            parts[names[text]] = _with_parts(schema, name)
        return {"$ref": f"#/$defs/{names[text]}"}

    for schema in kinds.values():
        count(schema)
    return {"kinds": {kind: name(schema) for kind, schema in kinds.items()}, "$defs": parts}


def _with_parts(schema: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A schema with the schemas in it changed; the names of fields, which may be any word, are left alone."""
    changed = dict(schema)
    if "properties" in schema:
        changed["properties"] = {key: change(part) for key, part in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            changed[key] = change(schema[key])
    return changed


def kind(path: Path) -> tuple[str, dict[str, Any]]:
    """The name of a kind and its schema."""
    content = path.read_bytes()
    definition = yaml.safe_load(gzip.decompress(content) if path.suffix == ".gz" else content)
    version = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")
    found = reduced(version["schema"]["openAPIV3Schema"])
    del found["properties"]["status"]
    name = definition["spec"]["names"]["kind"]
    found["properties"] |= {
        "apiVersion": {"enum": ["ray.io/v1"]},
        "kind": {"enum": [name]},
        "metadata": _METADATA,
    }
    found["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return name, found


def main() -> None:
    schema = named(dict(kind(Path(path)) for path in sys.argv[1:]))
    source = "fields of the definitions (CRDs) of KubeRay 1.7, Apache-2.0; made by reduce.py"
    text = json.dumps({"$comment": source, **schema}, separators=(",", ":"))
    OUTPUT.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes, {len(text)} without compression")


if __name__ == "__main__":
    main()
