"""The ClientApp: trains on the client's own images; `co3_mod` makes the reply small.

The app below is an ordinary one: it returns its gradient, or its new weights. Converting,
correcting and compressing happen in the mod, which stands first and therefore outermost, and on
the device that trains: `device_record` leaves the tensors there.
"""

from functools import partial
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from co3_flower import ConfigError, co3_mod, device_record
from co3_flower.records import client_id, derive_seed
from sim.capture import save_update
from sim.data import client_positions, shared_images
from sim.images import Images, read_own
from sim.models import build_model, check_image_size
from sim.settings import Settings, expand_path
from sim.task import choose_device, local_sgd, mean_gradient, num_local_batches, seed_everything

NUM_CLASSES = "num-classes"  # in the PS's train messages: a client may not have images of all

app = ClientApp(mods=[partial(co3_mod, observe=save_update)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's images and reply with a gradient or with new weights."""
    settings = Settings.from_run_config(context.run_config)
    config = message.content["config"]
    num_classes = int(config[NUM_CLASSES])
    images = _client_images(settings, context, num_classes)
    device = choose_device(settings.device)
    rng = seed_everything(
        derive_seed(settings.seed, int(config["server-round"]), client_id(context))
    )
    net = build_model(settings.model, num_classes)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
    net.to(device)

    num_local = num_local_batches(
        len(images),
        batch_size=settings.batch_size,
        local_steps=settings.local_steps,
        local_epochs=settings.local_epochs,
    )
    work = {
        "batch_size": settings.batch_size,
        "num_local": num_local,
        "rng": rng,
        "device": device,
        "augmented": settings.augment,
    }
    reply = RecordDict()
    if settings.payload == "gradient":
        gradient, loss = mean_gradient(net, images, **work)
        reply["gradient"] = device_record(gradient)
    else:
        loss = local_sgd(net, images, lr=settings.lr, **work)
    reply["arrays"] = device_record(net.state_dict())
    reply["metrics"] = MetricRecord({"num-examples": len(images), "train-loss": loss})
    return Message(content=reply, reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Let `co3_mod` answer the PS, which asks for client-ids; without this it would ask thrice."""
    return Message(RecordDict(), reply_to=message)


def _client_images(settings: Settings, context: Context, num_classes: int) -> Images:
    """Return the images of the node: its own, or its share of the data set."""
    node = context.node_config
    if "data-dir" in node:
        folder = Path(expand_path(str(node["data-dir"]), "data-dir in node-config"))
        images = read_own(folder.absolute(), num_classes)
        check_image_size(settings.model, images.pixels.shape[1:3])
        return images
    if "partition-id" not in node or "num-partitions" not in node:
        raise ConfigError(
            f"node-config must hold data-dir, or partition-id and num-partitions, got {dict(node)};"
            """ start the SuperNode with --node-config 'data-dir="/path" client-id="a"'"""
        )
    shared = shared_images(settings.dataset, settings.data_dir)
    positions = client_positions(
        int(node["partition-id"]),
        int(node["num-partitions"]),
        dataset=settings.dataset,
        data_dir=settings.data_dir,
        partition=settings.partition,
        alpha=settings.dirichlet_alpha,
        seed=settings.seed,
    )
    return shared.subset(positions)
