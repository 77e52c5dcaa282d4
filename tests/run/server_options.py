"""The options of vLLM's and SGLang's argument parsers, read from the sources in their wheels.

    python -m tests.run.server_options vllm-0.33.0-*.whl sglang-0.5.23-*.whl

Writes server_options.json beside this file: of each server its version, its licence, and its
options, and the values of those that are restricted to some.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

FILE = Path(__file__).with_suffix(".json")
SOURCES = {
    "vllm": r"vllm/(engine/arg_utils|config/\w+)\.py",
    "sglang": r"sglang/srt/(arg_groups/fields/\w+|server_args)\.py",
}
Options = dict[str, list[str] | None]


def literals(tree: ast.AST) -> dict[str, list[str]]:
    """The aliases of Literal[...] in a module, by name."""
    return {
        target.id: [
            str(value.value) for value in ast.walk(node.value) if isinstance(value, ast.Constant)
        ]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "Literal" in ast.dump(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def of_vllm(trees: Sequence[ast.AST]) -> Options:
    """Of `add_argument("--name", **kwargs["field"])`; choices are those of the field's type."""
    known = {name: values for tree in trees for name, values in literals(tree).items()}
    types = {
        node.target.id: next(
            (
                known[name]
                for name in known
                if re.search(rf"\b{name}\b", ast.unparse(node.annotation))
            ),
            None,
        )
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    options: Options = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for name in (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)):
                field = name.lstrip("-").replace("-", "_")
                options[name] = types.get(
                    {"scheduling_policy": "policy", "kv_cache_dtype": "cache_dtype"}.get(
                        field, field
                    )
                )
    return options


def of_sglang(trees: Sequence[ast.AST]) -> Options:
    """Of the annotated fields, with their aliases and choices."""
    options: Options = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, ast.AnnAssign) or not ast.unparse(node.annotation).startswith("A["):
            continue
        assert isinstance(node.target, ast.Name)
        given = {
            word.arg: ast.literal_eval(word.value)
            for call in ast.walk(node.annotation)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Arg"
            for word in call.keywords
            if word.arg in ("choices", "aliases", "cli_name")
            and isinstance(word.value, ast.List | ast.Constant)
        }
        usual = "--" + node.target.id.replace("_", "-")
        for name in (given.get("cli_name") or usual, *(given.get("aliases") or ())):
            options[name] = given.get("choices")
    return options


def main(wheels: list[str]) -> None:
    servers = {}
    for wheel, of in zip(wheels, (of_vllm, of_sglang), strict=True):
        name, version = Path(wheel).name.split("-")[:2]
        with ZipFile(wheel) as file:
            paths = [path for path in file.namelist() if re.fullmatch(SOURCES[name], path)]
            trees = [ast.parse(file.read(path)) for path in sorted(paths)]
        found = sorted(of(trees).items())
        servers[name] = {
            "version": version,
            "licence": "Apache-2.0",
            "options": [option for option, _ in found],
            "choices": {option: values for option, values in found if values},
        }
    FILE.write_text(json.dumps(servers, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
