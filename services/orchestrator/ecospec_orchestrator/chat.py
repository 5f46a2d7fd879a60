"""A talk in the terminal: the messages so far, the answer as it comes, and a line of figures."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

from .chat_client import ChatClient, ChatError

HELP = "/new begins another talk, /policy NAME changes the policy, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."
# A text must not steer the terminal: of the control characters only line feed and tab pass.
_CONTROL = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    return text.translate(_CONTROL)


class StatusLine:
    """Without a terminal: one line per answer, when it is over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None: ...

    def show(self, text: str) -> None: ...

    def close(self, text: str) -> None:
        print(f"[{text}]", file=self._stream, flush=True)


class StatusRow:
    """The last row of a terminal, while an answer scrolls above it; afterwards the line stays below the answer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size = (0, 0)

    def open(self) -> None:
        self._keep_free()

    def show(self, text: str) -> None:
        self._keep_free()
        columns, rows = self._size
        if rows:
            # Save the place, go to the last row, clear it, write faintly, come back.
            self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")

    def close(self, text: str) -> None:
        if self._size[1]:  # the whole terminal scrolls again, and its last row is empty
            self._write(f"\x1b7\x1b[r\x1b[{self._size[1]};1H\x1b[2K\x1b8")
            self._size = (0, 0)
        self._write(f"\x1b[2m[{text}]\x1b[0m\n")

    def _keep_free(self) -> None:
        """Only the rows above the last scroll; again after the terminal has changed its size."""
        columns, rows = shutil.get_terminal_size()
        if (columns, rows) != self._size and rows > 2:
            self._size = (columns, rows)
            # A line feed and back up, so that the cursor is not on the last row.
            self._write(f"\n\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@dataclass
class Talk:
    client: ChatClient
    status: StatusLine | StatusRow
    out: TextIO
    err: TextIO
    messages: list[dict[str, str]] = field(default_factory=list)

    def converse(self) -> None:
        """With a person, until they leave."""
        while True:
            try:
                line = input("\n> ").strip()
            except EOFError:
                print(file=self.out)
                return
            except KeyboardInterrupt:
                print("\nCtrl-D leaves.", file=self.out)
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._asked(line)

    def answer_lines(self, source: Iterable[str]) -> int:
        """Every line is a question. Exit code: 1 at the first that gets no answer."""
        return 0 if all(self._asked(line) for line in filter(None, map(str.strip, source))) else 1

    def _asked(self, question: str) -> bool:
        """False when that failed; then the reason was told."""
        try:
            self.ask(question)
        except ChatError as error:
            print(printable(str(error)), file=self.err)
            return False
        return True

    def _obey(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command == "/new":
            self.messages.clear()
            print("A new talk.", file=self.out)
        elif command == "/policy":
            self.client.policy = argument.strip() or None
            print(f"Policy: {self.client.policy or 'the server decides'}.", file=self.out)
        else:
            print(HELP, file=self.out)

    def ask(self, question: str) -> None:
        """Show the answer as it comes, and keep it. Ctrl-C ends it and keeps what came. Raises ChatError, and then the question is
        forgotten."""
        text, ended = "", ""
        self.messages.append({"role": "user", "content": question})
        self.status.open()
        pieces = self.client.answer(self.messages)
        try:
            for piece in pieces:
                text += piece
                self.out.write(printable(piece))
                self.out.flush()
                self.status.show(self.client.figures.line())
        except KeyboardInterrupt:
            ended = ", stopped"
        except ChatError:
            self.messages.pop()
            ended = ", failed"
            raise
        finally:
            pieces.close()  # which ends the answer on the server
            self.out.write("\n")
            self.out.flush()
            self.status.close(self.client.figures.line() + ended)
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()
