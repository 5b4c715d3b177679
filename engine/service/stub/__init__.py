"""Runs in the engine stub, the Python process that Triton starts for the model `engine`.

The way of a request in: `responder` reads it (`engine_inputs`), `engine_client` refuses it
if the engine died of it before (`PoisonRequestGuard`), counts it in (`Admission`), and sends it to
the process.

The way of a token out, from the engine's loop to Triton's response sender:

1. engine process, loop: `EngineLoop` gives the outputs of a step, `StepOutputs`, to `Writer.put`.
2. engine process, writer thread: `Writer` sends all that have queued up as one frame (`Channel`).
3. engine stub, supervisor thread: `EngineClient.on_message` appends the bytes of each row to the
   `RequestStream` of its request and puts the streams of the frame into `Delivery` at once.
4. engine stub, a sender thread (`delivery`): when the next response of a stream is due by the
   `RateController`, it takes the stream from the `DeliveryQueue`, with others that are due;
   `RequestStream.deliver` makes one response of all that the stream holds; `EnsembleSink.send` or
   `ClientSink.send` encodes it and calls Triton's `sender.send`. `AckWindow` bounds how many
   responses are on their way to the detokenizer.

An error takes the same way as the outputs, so that it never overtakes them. When the last response
has been sent, the sender thread calls `EngineClient` once more, which logs how the request ended.

`supervisor` starts the engine process (`engine_process`), watches it (`Watchdog`) and replaces it
when it has died. `metrics` publishes what it reports.
"""
