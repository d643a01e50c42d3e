"""What columns mean: the documented rule, one-hot encoding, and faults with their place."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doxa.errors import DataError, StoreError
from doxa.tables.schema import Schema, infer_schema, with_target

pd = pytest.importorskip("pandas")

N = 40
RNG = np.random.default_rng(0)


def table(**columns) -> pd.DataFrame:
    return pd.DataFrame({"x": RNG.normal(size=N)} | columns)


@pytest.mark.parametrize(
    ("target", "likelihood", "classes"),
    [
        (RNG.normal(size=N), "gaussian", None),
        (np.repeat([1.0, 2.0], N // 2), "gaussian", None),  # floats are measurements
        (np.arange(N), "gaussian", None),  # many distinct whole numbers
        (np.repeat([3, 1, 2, 5], N // 4), "categorical", (1, 2, 3, 5)),
        (np.repeat([1, 0], N // 2), "bernoulli", (0, 1)),
        (np.repeat([True, False], N // 2), "bernoulli", (False, True)),
        (np.repeat(["no", "yes"], N // 2), "bernoulli", ("no", "yes")),
        (np.repeat(["b", "a", "c", "d"], N // 4), "categorical", ("a", "b", "c", "d")),
        (pd.Categorical(np.repeat(["b", "a"], N // 2)), "bernoulli", ("a", "b")),
        ([str(v) for v in np.arange(N) / 7], "gaussian", None),  # numbers written as text
    ],
)
def test_the_task_is_inferred_and_said(target, likelihood, classes) -> None:
    schema = infer_schema(table(y=target), "y")
    assert (schema.likelihood, schema.classes) == (likelihood, classes)
    assert likelihood in schema.notes[0]
    assert schema.outputs == (len(classes) if likelihood == "categorical" else 1)


def test_a_likelihood_asked_for_wins() -> None:
    counts = table(y=np.repeat([0, 1, 2, 3], N // 4))
    assert infer_schema(counts, "y", "poisson").classes is None
    assert infer_schema(counts, "y", "heteroscedastic").outputs == 2
    floats = table(y=np.repeat([1.0, 2.0], N // 2))
    assert infer_schema(floats, "y", "categorical").classes == (1.0, 2.0)
    assert infer_schema(floats, "y", "categorical").outputs == 2
    with pytest.raises(DataError, match="did you mean 'gaussian'"):
        infer_schema(counts, "y", "gausian")
    with pytest.raises(DataError, match="bernoulli needs two"):
        infer_schema(counts, "y", "bernoulli")


def test_few_rows_of_whole_numbers_are_a_regression() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [4, 8, 9]})
    assert infer_schema(frame, "y").likelihood == "gaussian"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"y": ["a"] * N}, "one class only"),
        ({"y": [1.0] * (N - 1) + [np.nan]}, f"missing values: column 'y', row {N - 1}"),
        ({"y": [str(k) for k in range(N - 1)] + ["oops"]}, f"column 'y', row {N - 1}: 'oops'"),
        ({"y": [f"name{k}" for k in range(N)]}, "classes in"),
        ({"y": [2.5] * N}, "column 'y' is 2.5 in every row"),
        ({"y": np.repeat(["2024-01-31", "2024-03-01"], N // 2)}, "holds dates"),
        (
            {"y": np.arange(N) / 3, "age": ["7"] * (N - 1) + ["seven"]},
            f"column 'age', row {N - 1}: 'seven'",
        ),
        (
            {"y": np.arange(N) / 3, "age": [1.0, np.inf] * (N // 2)},
            r"row 1 \(20 in all\): 'inf' is not finite",
        ),
        (
            {
                "y": np.arange(N) / 3,
                "age": [1.0, np.nan] * (N // 2),
                "c": [None, "u", "v", "u"] * (N // 4),
            },
            r"'age', row 1 \(20 in all\); column 'c', row 0 \(10 in all\)\. --missing",
        ),
    ],
)
def test_faults_name_column_and_row(columns, message) -> None:
    with pytest.raises(DataError, match=message):
        infer_schema(table(**columns), "y")


def test_a_mistyped_column_gets_a_suggestion() -> None:
    with pytest.raises(DataError, match="no column 'prise'; did you mean 'price'"):
        infer_schema(table(price=RNG.normal(size=N)), "prise")
    with pytest.raises(DataError, match="known: x, y"):
        infer_schema(table(y=RNG.normal(size=N)), "zzz")
    with pytest.raises(DataError, match="no column 'xx'"):
        infer_schema(table(y=RNG.normal(size=N)), "y", drop=["xx"])


def test_columns_without_use_are_left_out_and_said() -> None:
    frame = table(
        y=RNG.normal(size=N),
        same=[4] * N,
        when=["03/04/2024", "05/06/2024"] * (N // 2),  # April or March?
        customer_id=RNG.permutation(N) + 17,
        count=np.arange(1, N + 1),
        ticket=np.arange(10_000, 10_000 + N),
        kundennr=RNG.permutation(N) + 500,
        key=[str(uuid.UUID(int=int(k))) for k in RNG.permutation(N)],
        name=[f"person {k}" for k in range(N)],
        nothing=[None] * N,
        asked=RNG.normal(size=N),
    )
    schema = infer_schema(frame, "y", drop=["asked"])
    assert [column.name for column in schema.columns] == ["x"]
    said = " | ".join(schema.notes)
    assert schema.left_out == tuple(frame.columns[2:])
    for name in schema.left_out:
        assert f"column '{name}' dropped" in said
    with pytest.raises(DataError, match=r"no input column is left.*constant"):
        infer_schema(pd.DataFrame({"y": np.arange(9) / 2, "same": 1}), "y")


def test_an_id_is_used_when_asked_for_and_a_year_is_none() -> None:
    frame = table(y=RNG.normal(size=N), nr=np.arange(N), year=np.arange(1980, 1980 + N))
    assert [c.name for c in infer_schema(frame, "y").columns] == ["x", "year"]
    assert [c.name for c in infer_schema(frame, "y", numeric=["nr"]).columns] == ["x", "nr", "year"]
    alone = infer_schema(pd.DataFrame({"same": 1, "step": range(N), "y": frame["y"]}), "y")
    assert [c.name for c in alone.columns] == ["step"] and alone.left_out == ("same",)
    assert "'step' counts the rows; used because it is the only input" in alone.notes[2]
    with pytest.raises(DataError, match="both numeric and categorical"):
        infer_schema(frame, "y", numeric=["nr"], categorical=["nr"])


@pytest.mark.parametrize(
    ("written", "layout"),
    [
        ("%Y-%m-%d", "year-month-day"),
        ("%Y/%m/%d", "year-month-day"),
        ("%Y-%m-%dT%H:%M:%SZ", "year-month-day"),
        ("%d.%m.%Y", "day first"),
        ("%d/%m/%Y", "day first"),
        ("%m/%d/%Y", "month first"),
        (None, "year-month-day"),  # as Parquet has them
    ],
)
def test_dates_become_days_month_and_weekday(written, layout) -> None:
    dates = pd.date_range("2023-11-20", periods=N, freq="5D")
    when = dates if written is None else dates.strftime(written)
    frame = pd.DataFrame({"when": when, "y": RNG.normal(size=N)})
    schema = infer_schema(frame, "y")
    assert (
        f"'when' holds dates ({layout}): days since 1970-01-01, month, weekday" in schema.notes[1]
    )
    x, _ = schema.features(frame)
    expected = [(d.toordinal() - 719163, d.month, d.weekday()) for d in dates.date]
    assert x.tolist() == [list(map(float, row)) for row in expected]
    again = Schema.from_json(schema.to_json())
    assert np.array_equal(again.features(frame)[0], x)
    if written is not None:
        frame.loc[3, "when"] = "tomorrow"
        with pytest.raises(DataError, match="column 'when', row 3: 'tomorrow' is not a date"):
            schema.features(frame)


def gappy() -> pd.DataFrame:
    frame = table(y=RNG.normal(size=N), z=RNG.normal(size=N), city=["Rome", "Oslo"] * (N // 2))
    frame["when"] = pd.date_range("2020-01-01", periods=N, freq="9D")
    frame.loc[[2, 7], "x"] = np.nan
    frame.loc[4, "city"] = None
    frame.loc[5, "when"] = None
    return frame


def test_missing_cells_are_filled_and_marked_when_asked() -> None:
    frame = gappy()
    schema = infer_schema(frame, "y", missing="impute")
    names = [name for column in schema.columns for name in column.inputs]
    assert names == ["x", "x (missing)", "z", "city = Oslo", "city = Rome", "city = missing",
                     "when (day)", "when (month)", "when (weekday)", "when (missing)"]  # fmt: skip
    x, notes = schema.features(frame)
    assert notes == [] and np.isfinite(x).all()
    assert set(x[[2, 7], 0]) == {frame["x"].median()}
    assert np.flatnonzero(x[:, 1]).tolist() == [2, 7]
    assert np.flatnonzero(x[:, 5]).tolist() == [4] and x[4, 3:5].tolist() == [0.0, 0.0]
    middle = frame["when"].median()
    assert x[5, 6:].tolist() == [(middle - pd.Timestamp(0)) / pd.Timedelta(days=1), middle.month,
                                 middle.weekday(), 1.0]  # fmt: skip
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_gaps_that_come_only_later_are_filled_and_said_or_refused() -> None:
    frame = gappy().dropna()
    new = gappy().assign(z=np.nan)
    strict = infer_schema(frame, "y")
    with pytest.raises(DataError, match=r"'x', row 2 \(2 in all\); column 'z', row 0 \(40 in all"):
        strict.features(new)
    schema = infer_schema(frame, "y", missing="impute")
    x, notes = schema.features(new)
    assert set(x[:, 1]) == {frame["z"].median()}
    said = " | ".join(notes)
    assert "'z': 40 cells missing, none in the fit; filled with the median" in said
    assert "'city': 'missing' not seen in the fit (1 row)" in said


def test_rows_without_a_target_are_left_out_when_asked() -> None:
    frame = gappy()
    frame.loc[[1, 3], "y"] = np.nan
    assert with_target(frame, "y", "error")[0] is frame
    kept, (said,) = with_target(frame, "y", "impute")
    assert len(kept) == N - 2 and "2 rows dropped" in said and "row 1" in said
    with pytest.raises(DataError, match="has no values"):
        with_target(frame.assign(y=np.nan), "y", "impute")


def test_a_schema_of_an_older_doxa_still_reads() -> None:
    saved = {
        "target": "y", "likelihood": "gaussian", "classes": None, "index": None,
        "notes": ["target 'y': regression, likelihood gaussian"],
        "columns": [{"name": "x", "categories": None}, {"name": "c", "categories": ["a", "b"]}],
    }  # fmt: skip
    schema = Schema.from_json(saved)
    x, notes = schema.features(pd.DataFrame({"c": ["b", "a"], "x": [1.5, 2.5]}))
    assert x.tolist() == [[1.5, 0.0, 1.0], [2.5, 1.0, 0.0]] and notes == []


def test_one_hot_equals_pandas_get_dummies() -> None:
    colour = RNG.choice(["red", "green", "blue"], N)
    frame = table(y=RNG.normal(size=N), colour=colour, flag=RNG.random(N) < 0.5)
    schema = infer_schema(frame, "y")
    x, notes = schema.features(frame)
    expected = pd.get_dummies(frame.drop(columns="y").astype({"flag": str}), dtype=float)
    assert schema.inputs == x.shape[1] == 1 + 3 + 2
    assert np.array_equal(x, expected.to_numpy())
    assert notes == []


def test_an_unseen_category_is_zeros_and_said() -> None:
    frame = table(y=RNG.normal(size=N), city=["Rome", "Oslo"] * (N // 2))
    schema = infer_schema(frame, "y")
    new = pd.DataFrame({"x": [0.0, 1.0], "city": ["Oslo", "Bern"]})
    x, notes = schema.features(new)
    assert x[:, 1:].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert len(notes) == 1 and "'Bern' not seen in the fit (1 row)" in notes[0]


def test_numbers_can_be_forced_to_be_categories() -> None:
    frame = table(y=RNG.normal(size=N), code=np.repeat([7, 8], N // 2))
    schema = infer_schema(frame, "y", categorical=["code"])
    assert schema.columns[1].categories == ("7", "8")
    x, _ = schema.features(pd.DataFrame({"x": [0.0], "code": [8.0]}))  # another file types it float
    assert x.tolist() == [[0.0, 0.0, 1.0]]


def test_targets_are_class_numbers_in_the_order_of_the_classes() -> None:
    frame = table(y=["c", "a", "b", "a"] * (N // 4))
    schema = infer_schema(frame, "y")
    assert schema.targets(frame)[:4].tolist() == [2, 0, 1, 0]
    with pytest.raises(DataError, match="row 1: class 'd' was not seen"):
        schema.targets(pd.DataFrame({"y": ["a", "d"]}))


def test_column_order_and_extra_columns_do_not_matter() -> None:
    frame = table(y=RNG.normal(size=N), z=RNG.normal(size=N))
    schema = infer_schema(frame, "y")
    x, _ = schema.features(frame)
    shuffled = frame[["z", "y", "x"]].assign(extra="?", more=1)
    again, notes = schema.features(shuffled)
    assert np.array_equal(again, x)
    assert notes == ["columns that the fit did not have are not used: 'extra', 'more'"]
    with pytest.raises(DataError, match="no column 'z'"):
        schema.features(frame.drop(columns="z"))
    with pytest.raises(DataError, match="no columns 'x', 'z'; there are: X, Y, Z"):
        schema.features(frame.rename(columns=str.upper))


@settings(deadline=None, max_examples=30)
@given(
    categories=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zs"]), min_size=1),
        min_size=2, max_size=6, unique_by=lambda t: t.strip(),
    ),
    target=st.sampled_from(["float", "bool", "text", "int"]),
)  # fmt: skip
def test_a_schema_survives_json(categories: list[str], target: str) -> None:
    ys = {
        "float": np.arange(N) / 3,
        "bool": np.repeat([True, False], N // 2),
        "text": np.repeat(["no", "yes"], N // 2),
        "int": np.repeat([0, 1, 2, 7], N // 4),
    }
    frame = table(y=ys[target], c=[f"c{categories[k % len(categories)]}" for k in range(N)])
    schema = infer_schema(frame, "y")
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert np.array_equal(again.features(frame)[0], schema.features(frame)[0])
    assert np.array_equal(again.targets(frame), schema.targets(frame))


def test_a_saved_schema_that_was_tampered_with_is_one_error() -> None:
    """Each field in turn holds something else; whatever is accepted can be used."""
    frame = pd.DataFrame({
        "a": np.arange(30.0) ** 2, "kind": ["u", "v", "w"] * 10,
        "day": [f"2024-01-{1 + i:02}" for i in range(30)], "y": ["no", "yes"] * 15,
    })  # fmt: skip
    good = infer_schema(frame, "y", missing="impute").to_json()
    bad = (None, 3, -1, "x", [], {}, ["a"], [1], [[1]], {"a": 1}, float("nan"), True, "a" * 9)
    fields = [("", name) for name in good]
    fields += [(i, name) for i, column in enumerate(good["columns"]) for name in column]
    accepted = 0
    for place, name in fields:
        for value in bad:
            saved = json.loads(json.dumps(good))
            holder = saved if place == "" else saved["columns"][place]
            holder[name] = value
            try:
                found = Schema.from_json(saved)
                found.features(frame)
                found.targets(frame)
                accepted += 1
            except (DataError, StoreError):
                continue
    assert accepted < len(fields) * len(bad) / 4
    for other in (None, [], "x", {}, {**good, "columns": [3]}, {**good, "unknown": 1}):
        with pytest.raises(StoreError, match="the schema of the run's table"):
            Schema.from_json(other)
    assert Schema.from_json(good).to_json() == good
