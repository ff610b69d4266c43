"""`Forms`: for how many forms of its inputs each function of a model was compiled, and what Dynamo left alone."""

from __future__ import annotations

import logging
from collections import Counter

from amp_compiler.fx.capture.frontend import FEWER_FORMS
from amp_compiler.fx.torch_private.breaks import reason_here
from amp_compiler.fx.torch_private.dynamo import function_here

logger = logging.getLogger("amp_compiler")
MANY_FORMS = 8  # of one function: they are told of


class Forms:
    """Counts the graphs of each function, and says once that they become many.

    Args:
        name: of the model, for messages.
        most: for how many forms a function may be compiled.

    Attributes:
        given_up: why the model is to run under `torch.autocast` from now on; empty while it is not.
    """

    def __init__(self, name: str, most: int) -> None:
        self.most, self.given_up, self._name = most, "", name
        self._compiled: Counter[int] = Counter()  # by function
        self._told: set[str] = set()

    def note(self) -> None:
        """Count a graph that Dynamo has just made."""
        function, reason = function_here(), reason_here()
        self._compiled[function] += 1
        forms, said = self._compiled[function], f": this no longer held: {reason}" if reason else ""
        if forms >= self.most:
            self.given_up = f"a function of it was compiled for {forms} forms of its inputs{said}; {FEWER_FORMS}"
        elif forms == MANY_FORMS and "forms" not in self._told:
            self._told.add("forms")
            logger.warning(
                "a function of %s was compiled for %d forms of its inputs%s; %s", self._name, forms, said, FEWER_FORMS
            )

    def note_skipped(self, has_parameters: bool) -> None:
        """Dynamo gave up a function of a call: what that computes itself has no plan."""
        if not self._compiled and has_parameters:
            self.given_up = "Dynamo captured nothing of it (TORCH_LOGS=graph_breaks says why)"
        elif "skipped" not in self._told:
            self._told.add("skipped")
            logger.warning(
                "Dynamo gave up functions of %s: what these compute themselves runs in the model's types, unplanned;"
                " TORCH_LOGS=graph_breaks names them",
                self._name,
            )
