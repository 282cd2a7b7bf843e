"""The base models that adapters may be for now; any thread may read them while they change."""

from collections.abc import Iterator

from registry.base.base_model import BaseModel
from registry.errors import Invalid, shown
from registry.ref import BaseRef


class BaseModels:
    """Base models, the preferred one first. Two may have one revision, and then different names."""

    def __init__(self, *models: BaseModel) -> None:
        self._models = models

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._models)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.model_id for model in self._models)

    @property
    def revisions(self) -> tuple[str, ...]:
        return tuple(model.base_revision for model in self._models)

    def named(self, model_id: str, param: str) -> BaseModel:
        """The base model of this name. Raises Invalid, which names the parameter."""
        for model in self._models:
            if model.model_id == model_id:
                return model
        names = ", ".join(self.names)
        message = f"{param}: no base model {shown(model_id)} is served; use one of: {names}."
        raise Invalid(message, code="unknown_base_model", param=param)

    def candidates(self, model_id: str | None) -> tuple[BaseModel, ...]:
        """The base models that an upload may be for: the one it names, or all if it names none.

        Raises Invalid.
        """
        return self._models if model_id is None else (self.named(model_id, "base_model"),)

    def serving(self, ref: BaseRef) -> BaseModel | None:
        """The base model that serves the versions of `ref`: the one of its name, while it has the
        same weights; else, since an operator may have renamed it, the first of the same variant.
        """
        of_revision = [model for model in self._models if model.base_revision == ref.revision]
        for model in of_revision:
            if model.model_id == ref.model_id:
                return model
        return next((it for it in of_revision if it.variant == ref.variant), None)

    def alike(self, ref: BaseRef) -> tuple[str, ...]:
        """Names of those that have the weights of `ref`, whatever their templates and precision."""
        return tuple(it.model_id for it in self._models if it.base_revision == ref.revision)

    def replace(self, *models: BaseModel) -> None:
        """Let these be the base models from now on."""
        self._models = models
