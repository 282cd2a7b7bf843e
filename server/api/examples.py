"""Examples of answers, made from the examples of their fields."""

from typing import Any

from server.text.json_object import JsonObject


class NoExample(Exception):
    """A text, a number or an open object has no example; `path` is its place."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has no example: declare it with Field(examples=[...])")


def example_of(schema: JsonObject, schemas: JsonObject, path: str) -> Any:
    """A value that fits the schema. schemas: what `$ref` names. path: for errors.

    Raises NoExample.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return example_of(schemas[name], schemas, name)
    for given in ("examples", "enum"):
        if given in schema:
            return schema[given][0]
    for given in ("const", "default"):
        if given in schema:
            return schema[given]
    for alternatives in ("anyOf", "oneOf", "allOf"):
        if alternatives in schema:
            return example_of(schema[alternatives][0], schemas, path)
    match schema.get("type"):
        case "boolean":
            return False
        case "null":
            return None
        case "array":
            return [example_of(schema["items"], schemas, f"{path}[]")]
        case "object" if "properties" in schema:
            fields = schema["properties"].items()
            return {name: example_of(field, schemas, f"{path}.{name}") for name, field in fields}
    raise NoExample(path)
