"""The base of every JSON answer's model: what a route returns and the OpenAPI document says."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from server.text.times import unix_seconds


class Answer(BaseModel):
    """A JSON answer, or a part of one.

    Each text and number has an example (`Field(examples=[...])`), from which the OpenAPI document
    makes the answer's. A field without a value is null, never left out. Nothing is converted: a
    value of another type is a fault of ours.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_serialization_defaults_required=True,
        defer_build=True,  # the first answer of a kind builds its model, no start builds all
    )

    @classmethod
    def of_record(cls, record: object, **others: Any) -> Self:
        """Show a record by its attributes of the fields' names; a time `x_ms` is `x` in seconds.

        others: fields that the record does not have, or has in another form.
        """
        for name in cls.model_fields.keys() - others.keys():
            if hasattr(record, f"{name}_ms"):
                others[name] = unix_seconds(getattr(record, f"{name}_ms"))
            elif hasattr(record, name):
                others[name] = getattr(record, name)
        return cls(**others)
