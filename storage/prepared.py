"""Statements of the hot path: compiled once, then given to the driver itself.

SQLAlchemy's way through an execution costs five times SQLite's work for it, and with a server each
answer that is waited for costs more than the work. So a `transaction` of them goes out at once,
and waits only where it needs an answer.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import (
    Connection,
    Dialect,
    Executable,
    Float,
    Numeric,
    Table,
    bindparam,
    case,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InvalidRequestError, MultipleResultsFound

Fields = Mapping[str, Any]
# By this very use of a session: a lost one may be another thread's already as its own cleans up.
_PIPELINES: WeakKeyDictionary[Connection, Any] = WeakKeyDictionary()
# Each may raise what is left of an error; a session that is lost raises without an end.
_MOST_SYNCS = 4
_DIVISION_BY_ZERO, _NO_SUCH_ROW = "22012", "23503"
# From here on the arrays cost the driver less than a statement a row costs both sides.
_MANY_ROWS = 6


class Prepared:
    """One statement of SQLAlchemy Core, in the words of each database that it met.

    Lists to be expanded (`IN`) have no place in it.
    """

    def __init__(self, statement: Executable) -> None:
        self.statement = statement
        self._texts: dict[str, _Text] = {}

    def run(self, connection: Connection, fields: Fields) -> Answer:
        """Execute it within the connection's transaction.

        Raises:
            DBAPIError: as SQLAlchemy's own execution does; in a `transaction`, maybe by the
                answer.
        """
        text = self._text(connection.dialect)
        values = text.values(fields)
        with _errors(connection, text.sql, values):
            cursor = _driver(connection).cursor()
            connection.dispatch.before_cursor_execute(
                connection, cursor, text.sql, values, None, False)
            cursor.execute(text.sql, values)
        answer = Answer(connection, cursor, text)
        if connection.dialect.name == "sqlite":
            # A statement that is not read to its end has not done all of its work there.
            answer.fetch()
        return answer

    def run_each(self, connection: Connection, rows: Sequence[Fields]) -> None:
        """Execute it for each of the rows; what it returns is nobody's."""
        text = self._text(connection.dialect)
        values = [text.values(row) for row in rows]
        with _errors(connection, text.sql, values):
            cursor = _driver(connection).cursor()
            connection.dispatch.before_cursor_execute(
                connection, cursor, text.sql, values, None, True)
            cursor.executemany(text.sql, values)

    def _text(self, dialect: Dialect) -> _Text:
        found = self._texts.get(dialect.name)
        if found is None:
            found = self._texts[dialect.name] = _Text(self.statement, dialect)
        return found


def refusing_unless(condition: Any) -> Prepared:
    """Return a statement that PostgreSQL refuses, and with it its transaction, unless this holds.

    So a COMMIT can go out with it, before its answer is known; see `is_refusal`.
    """
    one, zero = literal_column("1"), literal_column("0")
    return Prepared(select((one / case((condition, one), else_=zero)).label("holds")))


def is_refusal(error: DBAPIError) -> bool:
    """Say whether a transaction failed for what it was said to depend on, or for a deleted row."""
    return getattr(error.orig, "sqlstate", None) in (_DIVISION_BY_ZERO, _NO_SUCH_ROW)


class PreparedRows:
    """An INSERT of rows; `conflict` says what becomes of one that is there.

    Of many rows PostgreSQL gets an array a column: no two of one call may be the same.
    """

    def __init__(
        self, dialect: str, table: Table, columns: Sequence[str],
        conflict: Callable[[Any], Executable],
    ) -> None:
        self._columns = columns
        insert = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table).inline()
        given = {name: bindparam(name, type_=table.c[name].type) for name in columns}
        self._one = Prepared(conflict(insert.values(given)))
        kinds = {name: postgresql.ARRAY(table.c[name].type) for name in columns}
        lists = [func.unnest(bindparam(name, type_=kind)) for name, kind in kinds.items()]
        self._many = Prepared(conflict(
            insert.from_select(columns, select(*lists), include_defaults=False)))

    def run(self, connection: Connection, rows: Sequence[Fields]) -> None:
        """Insert the rows within the connection's transaction.

        Raises:
            DBAPIError: as SQLAlchemy's own execution does.
        """
        if connection.dialect.name == "sqlite" or len(rows) < _MANY_ROWS:
            self._one.run_each(connection, rows)
            return
        lists = {name: [row[name] for row in rows] for name in self._columns}
        self._many.run(connection, lists)


class _Text:
    """A statement in the words of one database, and how values get in and out."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        self.sql: str = compiled.string
        binds = {name: bind for bind, name in compiled.bind_names.items()}
        converters = {name: _writer(bind.type, dialect) for name, bind in binds.items()}
        self._converters = [(name, use) for name, use in converters.items() if use is not None]
        fixed = {name: bind.value for name, bind in binds.items() if not bind.required}
        self._fixed = {name: value if (use := converters[name]) is None else use(value)
                       for name, value in fixed.items()}
        # By place or by name, as the driver wants it.
        self._order: list[str] | None = compiled.positiontup
        returned = list(statement.exported_columns)
        self.row: Any = namedtuple("Row", [column.name for column in returned])
        found = [(i, _reader(column.type, dialect)) for i, column in enumerate(returned)]
        self.readers = [(i, use) for i, use in found if use is not None]
        self.returns = bool(self.row._fields)

    def values(self, fields: Fields) -> Any:
        """Return what the driver is given for the fields."""
        merged = {**self._fixed, **fields}
        for name, convert in self._converters:
            if name in fields:
                merged[name] = convert(merged[name])
        return merged if self._order is None else [merged[name] for name in self._order]


def _writer(kind: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    return kind.dialect_impl(dialect).bind_processor(dialect)


def _reader(kind: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    if isinstance(kind, Float | Numeric):
        # Both drivers give numbers as they are.
        return None
    return kind.dialect_impl(dialect).result_processor(dialect, None)


class Answer:
    """What a statement gives back; on a server it may still be under way."""

    def __init__(self, connection: Connection, cursor: Any, text: _Text) -> None:
        self._connection, self._cursor, self._text = connection, cursor, text
        self._rows: list[Any] | None = None

    def fetch(self) -> None:
        """Wait for the answer."""
        if self._rows is not None:
            return
        with _errors(self._connection, self._text.sql, None):
            if not self._text.returns:
                self._rows = []
                _wait(self._connection)
                return
            found = self._cursor.fetchall()
        text = self._text
        if text.readers:
            found = [list(row) for row in found]
            for row in found:
                for i, read in text.readers:
                    row[i] = read(row[i])
        self._rows = [text.row._make(row) for row in found]

    def all(self) -> list[Any]:
        """Return its rows."""
        self.fetch()
        assert self._rows is not None
        return self._rows

    def one_or_none(self) -> Any:
        """Return its row, if it has one.

        Raises:
            MultipleResultsFound: it has more.
        """
        rows = self.all()
        if len(rows) > 1:
            raise MultipleResultsFound(f"{len(rows)} rows where one was expected")
        return rows[0] if rows else None

    def scalar(self) -> Any:
        """Return the first field of its row, or None."""
        row = self.one_or_none()
        return None if row is None else row[0]

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""
        self.fetch()
        n_rows = self._cursor.rowcount
        if n_rows < 0:
            raise InvalidRequestError("the answer has not come in")
        return n_rows


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Begin a transaction of prepared statements alone, and commit it at the end.

    A server gets them without waiting for each one's answer. SQLite has nobody to wait for.
    """
    if connection.dialect.name == "sqlite" or not _has_pipelines():
        with connection.begin():
            yield
        return
    with _without_begin(connection), connection.begin(), _pipeline(connection):
        driver = _driver(connection)
        driver.execute("BEGIN")
        yield
        # Its answer comes with the end of the pipeline; then SQLAlchemy has nothing to commit.
        driver.execute("COMMIT")


def _has_pipelines() -> bool:
    """Say whether the driver's library can; that of a system may be older than PostgreSQL 14."""
    from psycopg import Pipeline

    return Pipeline.is_supported()


@contextmanager
def _without_begin(connection: Connection) -> Iterator[None]:
    """Keep the driver from beginning a transaction: it would wait for the answer."""
    with _errors(connection, "(begin)", None):
        driver = _driver(connection)
        try:
            driver.autocommit = True
            yield
        finally:
            if not driver.closed:
                try:
                    driver.autocommit = False
                except BaseException:
                    # Never again in the pool: what it is told would be committed at once.
                    connection.invalidate()
                    raise


@contextmanager
def _pipeline(connection: Connection) -> Iterator[None]:
    context = _driver(connection).pipeline()
    _PIPELINES[connection] = pipeline = context.__enter__()
    try:
        with _errors(connection, "(several statements)", None):
            yield
    except BaseException:
        # What goes wrong after the first error is no news, and the driver would log it.
        _drain(pipeline)
        with suppress(Exception):
            context.__exit__(None, None, None)
        raise
    else:
        with _errors(connection, "(several statements)", None):
            context.__exit__(None, None, None)
    finally:
        _PIPELINES.pop(connection, None)


def _drain(pipeline: Any) -> None:
    """Hear all answers after an error, each of which says that it came after one."""
    for _ in range(_MOST_SYNCS):
        with suppress(Exception):
            pipeline.sync()
            return


def _wait(connection: Connection) -> None:
    """Have all answers come in that are under way."""
    pipeline = _PIPELINES.get(connection)
    if pipeline is not None:
        pipeline.sync()


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


@contextmanager
def _errors(connection: Connection, sql: str, values: Any) -> Iterator[None]:
    """Raise the driver's errors as SQLAlchemy's, and give up a session that is gone."""
    dialect: Any = connection.dialect
    try:
        yield
    except dialect.loaded_dbapi.Error as error:
        gone = dialect.is_disconnect(error, _driver(connection), None)
        if gone:
            connection.invalidate(error)
        raise DBAPIError.instance(
            sql, values, error, dialect.loaded_dbapi.Error,
            connection_invalidated=gone, dialect=dialect,
        ) from error
