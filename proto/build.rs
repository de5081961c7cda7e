//! Compiles the `.proto` files beside it, without a system protoc.
//!
//! Two things come out: the Rust types of the wire, and the descriptor set that reflection and `/json` serve.
//! They differ in one point. The descriptor set says `string` where the public interface does; the Rust types
//! hold **bytes** in those request fields, since Envoy puts raw header bytes there and a `String` would fail
//! the whole message (the two are the same on the wire).

// The one place that reads the environment directly: a build script has nothing else.
#![allow(clippy::disallowed_methods)]

use std::{env, error::Error, fs, path::Path};

use prost::Message;
use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};

/// Request fields that are text by the interface and arbitrary bytes in practice.
const BYTES_FIELDS: [(&str, &str); 3] = [
    ("RateLimitRequest", "domain"),
    ("Entry", "key"),
    ("Entry", "value"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut files = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"])?;
    let out = env::var("OUT_DIR")?;
    fs::write(Path::new(&out).join("rls.fds.bin"), files.encode_to_vec())?;

    text_to_bytes(&mut files);
    let mut config = prost_build::Config::new();
    config.bytes([
        ".envoy.service.ratelimit.v3.RateLimitRequest",
        ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry",
    ]);
    config.include_file("wire.rs");
    tonic_prost_build::configure()
        .build_client(false)
        .compile_fds_with_config(files, config)?;
    Ok(())
}

fn text_to_bytes(files: &mut FileDescriptorSet) {
    for file in &mut files.file {
        let mut messages: Vec<_> = file.message_type.iter_mut().collect();
        while let Some(message) = messages.pop() {
            for field in &mut message.field {
                if BYTES_FIELDS.contains(&(message.name.as_deref().unwrap_or(""), field.name())) {
                    field.set_type(Type::Bytes);
                }
            }
            messages.extend(message.nested_type.iter_mut());
        }
    }
}
