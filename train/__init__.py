"""Training of drafters, and the console commands.

`draftsmith.train(METHOD, ...)` trains: the package is callable, because one name cannot be both a
package and a function.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package as a function: `commands.python.train`, whose docstring says more."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .commands.python import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
