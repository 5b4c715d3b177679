"""Bodies of requests (pydantic) and of responses (msgspec).

They are not the types of `openai` 3.57 and `anthropic` 2.14: those accept what is refused here (at
most 827 of our 1,436 lines of classes have the fields of one of theirs), so /openapi.json and
"nothing is ignored" would need a class of ours over most of them. They are slower, too: a body of
380 kB takes 1.4 ms in place of 0.03 ms (chat), 3.7 in place of 1.4 ms (messages) and 5.2 in place
of 0.9 ms (responses) to validate, a chunk of a stream 8.7 in place of 0.3 us to make and encode;
importing them adds 60 MiB to each process.
"""
