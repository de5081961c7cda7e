//! The edge: what Envoy and operators speak to. Bytes off the wire become the words of
//! [`descriptor`](crate::descriptor) here, and nothing below this room knows the wire.
//!
//! [`listener`] opens sockets; [`connection`] serves HTTP/2 on them, from the first byte to the last goodbye;
//! [`authority`] makes every client's `:authority` one that the HTTP library accepts.

pub mod authority;
pub mod connection;
pub mod listener;
