"""Pickles of plain data, read by an interpreter of our own. Nothing is imported, no class can be reached, no torch.

A pickle is a program. This runs the opcodes that plain data needs, and refuses all others. A global is looked up in the caller's
table, never in a module: it is a constant, or a name that stands for one of the caller's own functions. A new instance is a
``Record``: its class's name, and the state it was given, once. What a hostile program can reach is therefore what it made itself.

Time is linear in the length of the program, and memory about thirty times that at worst: strings are no longer than what is there,
containers are counted, and keys of dicts are small.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zerolap.errors import ZerolapError
from zerolap.untrusted.files import printable

# Hashes of texts and bytes are salted; those of numbers and tuples are not, so that a file can have many of the same hash. Then every
# look-up takes as long as there are keys.
_KEY_LENGTH = 16  # of a tuple that is a key in a dict
_MOST_TUPLES = 20_000  # that are keys
_LARGEST_KEY = 2**61 - 2  # below the modulus of hashes of numbers
_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_LONGEST_NAME = 1000
_HASHED = (dict, set, frozenset)  # take more memory for each item
_SIZED = (tuple, bytes, bytearray, str)
_OBJECT_COST = 20  # bytes of a program that ask for a tensor are twice as many


class UnreadableError(ZerolapError):
    """Something that was to be read is not the plain data it should be."""


def refuse(why: str) -> NoReturn:
    raise UnreadableError(f"this is not plain data as torch writes it: {why}")


class Maker:
    """A function of ours that a global of a pickle stands for; only a pickle's REDUCE calls it."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Record:
    """A new instance in a pickle: what its class is called, and its state. The class itself is nowhere."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None


class Kind:
    """A class of which a pickle may have new instances, by name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


Table = Mapping[tuple[str, str], Any]


def parse(
    program: bytes,
    *,
    table: Table,
    stored: Callable[[Any], Any] | None = None,
    bytes_per_object: int = 2,
    asked_by: str = "it",
) -> Any:
    """What a pickle holds; UnreadableError if it is anything but plain data and what the table has.

    ``stored`` gives what a persistent id stands for. A program has at most one container for a certain number of its bytes.
    """
    try:
        found = _Interpreter(program, table, stored, len(program) // bytes_per_object + 64, asked_by).run()
    except (IndexError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise UnreadableError(f"this is not a complete pickle: {type(error).__name__}") from error
    return found


def refuse_all_but_plain(found: Any, *others: type) -> None:
    """Refuse what was parsed if it holds what only stands for something else; goes as deep as it is, without recursion."""
    seen, left = {id(found)}, [found]
    while left:
        value = left.pop()
        if type(value) in (Maker, Kind, Record, *others):
            refuse("a name where a value should be")
        inside: list[Any] = []
        if type(value) in (list, tuple):
            inside = list(value)
        elif type(value) in (dict, OrderedDict):
            inside = [*value, *value.values()]
        for each in inside:
            if type(each) not in _ATOMS and id(each) not in seen:
                seen.add(id(each))
                left.append(each)


class _Interpreter:
    def __init__(
        self, program: bytes, table: Table, stored: Callable[[Any], Any] | None, num_objects: int, asked_by: str
    ) -> None:
        self.program, self.table, self.stored, self.asked_by = program, table, stored, asked_by
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.objects_left = num_objects
        self.made_left = len(program)
        self.tuples_left = _MOST_TUPLES

    def run(self) -> Any:
        program, operations = self.program, _OPERATIONS
        while True:
            operation = operations.get(program[self.at])
            if operation is None:
                if program[self.at] != _STOP:
                    refuse(f"opcode {program[self.at]:#04x}")
                break
            self.at += 1
            operation(self)
        if len(self.stack) != 1 or self.marks or self.at + 1 != len(program):
            refuse("the pickle does not end where it should")
        return self.stack[0]

    # --- arguments and stack ------------------------------------------------------------------------------------------

    def take(self, length: int) -> bytes:
        if length < 0 or length > len(self.program) - self.at:
            refuse("the pickle is cut off")
        self.at += length
        return self.program[self.at - length : self.at]

    def unpack(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            refuse("a mark is where a value should be")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def top(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            refuse("a mark is where a value should be")
        return self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.objects_left -= 1
        if self.objects_left < 0:
            refuse("it has more containers than its length allows")
        self.stack.append(value)

    # --- operations ---------------------------------------------------------------------------------------------------

    def protocol(self) -> None:
        if not 2 <= self.take(1)[0] <= 5:
            refuse("an unknown protocol")

    def frame(self) -> None:
        if self.unpack(_U8) > len(self.program) - self.at:
            refuse("the pickle is cut off")

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def put(self, form: struct.Struct) -> None:
        self.memo[self.unpack(form)] = self.top()

    def get(self, form: struct.Struct) -> None:
        index = self.unpack(form)
        if index not in self.memo:
            refuse("nothing was noted under a number")
        self.stack.append(self.memo[index])

    def text(self, form: struct.Struct) -> None:
        self.push(self.take(self.unpack(form)).decode("utf-8", "surrogatepass"))

    def data(self, form: struct.Struct) -> None:
        self.push(self.take(self.unpack(form)))

    def long(self) -> None:
        self.push(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push_container(tuple(reversed(items)))

    def marked_tuple(self) -> None:
        self.push_container(tuple(self.pop_to_mark()))

    def append(self) -> None:
        value = self.pop()
        self.a_list().append(value)

    def appends(self) -> None:
        values = self.pop_to_mark()
        self.a_list().extend(values)

    def a_list(self) -> list[Any]:
        target = self.top()
        if type(target) is not list:
            refuse("items are appended to what is no list")
        return target

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.put_items([key, value])

    def set_items(self) -> None:
        self.put_items(self.pop_to_mark())

    def put_items(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            refuse("items are put into what is not a dict")
        self.tuples_left -= sum(type(key) is tuple for key in items[::2])
        if self.tuples_left < 0:
            refuse("too many tuples are keys")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.look_up(module, name)

    def line_global(self) -> None:
        self.look_up(self.line(), self.line())

    def line(self) -> str:
        end = self.program.find(b"\n", self.at, self.at + _LONGEST_NAME)
        if end < 0:
            refuse("a name does not end")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def look_up(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            refuse("a name that is not text")
        if (module, name) not in self.table:
            raise UnreadableError(
                f"{self.asked_by} asks for {printable(f'{module}.{name}', 200)}, which no checkpoint needs: it is not loaded"
            )
        self.push(self.table[module, name])

    def new_object(self) -> None:
        given, kind = self.pop(), self.pop()
        if type(kind) is not Kind or type(given) is not tuple or given:
            refuse("an instance of what is no class")
        self.push_container(Record(kind.name))

    def reduce(self) -> None:
        given, maker = self.pop(), self.pop()
        if type(maker) is not Maker or type(given) is not tuple:
            refuse("a call of what is no function")
        try:
            made = maker.make(*given)
        except UnreadableError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            refuse(f"{type(error).__name__}: {printable(str(error), 200)}")
        # A few bytes can ask again and again for something large, made of what was noted once.
        each = 2 if isinstance(made, _HASHED) else 1
        self.made_left -= 6 + (each * len(made) if isinstance(made, (*_HASHED, *_SIZED)) else _OBJECT_COST)
        if self.made_left < 0:
            refuse("it makes more than its length allows")
        self.push_container(made)

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if type(target) is OrderedDict and type(state) is dict:
            return  # what a module's state dict says of versions: nothing here reads it
        if type(target) is not Record or target.state is not None or type(state) not in (dict, tuple):
            refuse("a state for what has none")
        target.state = state

    def persistent(self) -> None:
        if self.stored is None:
            refuse("something stored elsewhere")
        self.push_container(self.stored(self.pop()))


def checked_key(key: Any) -> Any:
    """A key that is hashed and found in no time."""
    if type(key) is not Record and not _is_small(key):
        is_flat = type(key) is tuple and len(key) <= _KEY_LENGTH and all(map(_is_small, key))
        if not is_flat:
            refuse("a key that is neither text, a number of common size, nor a few of them")
    return key


def _is_small(key: Any) -> bool:
    if type(key) is int:
        return -_LARGEST_KEY <= key <= _LARGEST_KEY
    return type(key) in _ATOMS and type(key) is not complex


_U1, _U2, _U4, _U8, _I4, _F8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q", "<i", ">d"))
_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Interpreter], None]] = {
    0x80: _Interpreter.protocol,
    0x95: _Interpreter.frame,
    ord("("): _Interpreter.mark,
    0x94: _Interpreter.memoize,
    ord("q"): lambda self: self.put(_U1),
    ord("r"): lambda self: self.put(_U4),
    ord("h"): lambda self: self.get(_U1),
    ord("j"): lambda self: self.get(_U4),
    0x8C: lambda self: self.text(_U1),
    ord("X"): lambda self: self.text(_U4),
    ord("C"): lambda self: self.data(_U1),
    ord("B"): lambda self: self.data(_U4),
    ord("K"): lambda self: self.push(self.unpack(_U1)),
    ord("M"): lambda self: self.push(self.unpack(_U2)),
    ord("J"): lambda self: self.push(self.unpack(_I4)),
    ord("G"): lambda self: self.push(self.unpack(_F8)),
    0x8A: _Interpreter.long,
    ord("N"): lambda self: self.push(None),
    0x88: lambda self: self.push(True),
    0x89: lambda self: self.push(False),
    ord(")"): lambda self: self.push(()),
    0x85: lambda self: self.tuple_of(1),
    0x86: lambda self: self.tuple_of(2),
    0x87: lambda self: self.tuple_of(3),
    ord("t"): _Interpreter.marked_tuple,
    ord("]"): lambda self: self.push_container([]),
    ord("a"): _Interpreter.append,
    ord("e"): _Interpreter.appends,
    ord("}"): lambda self: self.push_container({}),
    ord("s"): _Interpreter.set_item,
    ord("u"): _Interpreter.set_items,
    0x93: _Interpreter.stack_global,
    ord("c"): _Interpreter.line_global,
    0x81: _Interpreter.new_object,
    ord("R"): _Interpreter.reduce,
    ord("b"): _Interpreter.build,
    ord("Q"): _Interpreter.persistent,
}
