"""TensorFlow Serving's API over HTTP and gRPC; the models' replicas answer."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from fastapi import Request
from fastapi.responses import Response

from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.access import Access
from sd_tf.serving.ray_app.admission import Room, Slots
from sd_tf.serving.ray_app.http import BODY_WITHIN, body_size, read_body, unless_gone
from sd_tf.serving.ray_app.listen import MOST_CONNECTIONS, address
from sd_tf.serving.ray_app.remote import LOST, ask

MODEL = re.compile(r"/v1/models/([^/:]+)")
LONGEST_DETAILS = 4000  # characters of a gRPC error, which is sent in a header
METHODS = {
    "/tensorflow.serving.PredictionService/Predict": "predict",
    "/tensorflow.serving.PredictionService/GetModelMetadata": "metadata",
    "/tensorflow.serving.ModelService/GetModelStatus": "status",
}
CODES = {code.value[0]: code for code in grpc.StatusCode}
CODE_OF_REFUSAL = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
NOT_REACHED = "The model cannot be reached at the moment. Try again later."


class Predictions(grpc.GenericRpcHandler):
    """Passes requests on to the replicas of the models that they name, without parsing them."""

    def __init__(
        self,
        nobody,
        models: dict[str, Any],
        served: Callable[[], str],
        access: Access,
        slots: Slots,
        room: Room,
        most: int,
    ):
        """Prepare for requests of at most `most` bytes.

        Args:
            nobody: a `ModelServer` without models, which answers requests for unknown ones.
            models: a handle of replicas for each model.
            served: gives the digest of the export that requests without a version are for.
        """
        self.nobody, self.models, self.served, self.access = nobody, models, served, access
        self.slots, self.room, self.most = slots, room, most

    # HTTP

    async def rest(self, request: Request) -> Response:
        from sd_tf.serving.tf_serving.rest import rest

        place = request.scope["raw_path"].decode("latin-1")
        found = MODEL.match(place)
        handle = self.models.get(unquote(found[1])) if found else None
        if handle is None:  # the answer does not depend on the body, so it is not parsed
            status, text = rest(self.nobody, request.method, place, b"{}")
            return Response(text, status, media_type="application/json")
        with self.slots.taken():
            async with self.room.held(body_size(request, self.most)) as keep:
                body = await read_body(request, self.most)
                keep(len(body))
                answer = ask(handle, "rest", self.served(), request.method, place, body)
                try:
                    status, text = await unless_gone(request, answer)
                except LOST as error:
                    raise RefusedError(503, NOT_REACHED) from error
        return Response(text, status, media_type="application/json")

    # gRPC

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return a method's handler, for gRPC's server.

        A client's stream of messages is accepted where the API has a single message. On the wire
        they are the same, but only a stream's message waits to be read until it is admitted.
        """
        method = METHODS.get(details.method)
        if method is None:
            return None
        return grpc.stream_unary_rpc_method_handler(partial(self._answer, method))

    async def _answer(self, method: str, messages, context) -> bytes:
        try:
            self.access.check_key(dict(context.invocation_metadata()).get("authorization"))
            with self.slots.taken():
                async with self.room.held(self.most) as keep:
                    message = await _first(messages)
                    keep(len(message))
                    code, answer = await self._answered(method, message)
        except RefusedError as error:
            code, answer = CODE_OF_REFUSAL[error.status].value[0], error.message
        except LOST:
            code, answer = grpc.StatusCode.UNAVAILABLE.value[0], NOT_REACHED
        if code:
            await context.abort(CODES[code], answer[:LONGEST_DETAILS])
        return answer

    async def _answered(self, method: str, message: bytes) -> tuple[int, bytes | str]:
        """Return gRPC's code, and the serialized answer or what is wrong."""
        from google.protobuf.message import DecodeError
        from tensorflow_serving.apis.get_model_status_pb2 import GetModelStatusRequest

        from sd_tf.serving.tf_serving.predict import REQUESTS, SIGNATURE_DEF, serialized

        try:  # in all requests the first field is the model's; this one has no other
            spec = GetModelStatusRequest.FromString(message).model_spec
        except DecodeError as error:
            raise RefusedError(422, "The message is not a request.") from error
        handle = self.models.get(spec.name)
        if handle is not None:
            return await ask(handle, "answer", self.served(), method, message)
        fields = {"metadata_field": [SIGNATURE_DEF]} if method == "metadata" else {}
        request = REQUESTS[method](model_spec=spec, **fields)
        return serialized(self.nobody, method, request.SerializeToString())


async def _first(messages) -> bytes:
    try:
        async with asyncio.timeout(BODY_WITHIN):
            return await anext(aiter(messages))
    except TimeoutError as error:
        message = f"The message was not received in {BODY_WITHIN:g} seconds."
        raise RefusedError(408, message) from error
    except StopAsyncIteration as error:
        raise RefusedError(422, "The call has no message.") from error


async def start_grpc(predictions: Predictions, host: str, port: int) -> grpc.aio.Server:
    """Listen for gRPC; fronts on one node share the port."""
    options = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", predictions.most),
        ("grpc.max_send_message_length", -1),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_CONNECTIONS)
    server.add_generic_rpc_handlers((predictions,))
    server.add_insecure_port(address(host, port))
    await server.start()
    return server
