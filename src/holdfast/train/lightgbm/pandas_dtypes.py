"""Columns that pandas keeps in Arrow memory, as LightGBM takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["normalize_pandas_for_lightgbm"]


def normalize_pandas_for_lightgbm(df: pd.DataFrame) -> pd.DataFrame:
    """The frame with numbers and booleans in pandas' own nullable types; other columns are not touched."""
    import pandas as pd
    import pyarrow.types as kinds

    names = (
        (kinds.is_signed_integer, "Int{}"),
        (kinds.is_unsigned_integer, "UInt{}"),
        (kinds.is_floating, "Float{}"),
        (kinds.is_boolean, "boolean"),
    )
    wanted = {}
    for column, dtype in df.dtypes.items():
        if isinstance(dtype, pd.ArrowDtype):
            arrow = dtype.pyarrow_dtype
            name = next((name for is_kind, name in names if is_kind(arrow)), None)
            if name is not None:
                wanted[column] = name.format(arrow.bit_width)
    return df.astype(wanted) if wanted else df
