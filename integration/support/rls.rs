//! A client on envoy-types: code that shares nothing with ours but the wire.

use envoy_types::pb::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse, rate_limit_service_client::RateLimitServiceClient,
    },
};
use tonic::{Status, transport::Channel};

/// A connected client.
#[derive(Clone)]
pub struct Client(pub RateLimitServiceClient<Channel>);

impl Client {
    /// To `http://host:port`.
    pub async fn connect(url: &str) -> Self {
        let client = RateLimitServiceClient::new(channel(url).await);
        Self(client.max_encoding_message_size(usize::MAX))
    }

    pub async fn ask(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.0
            .clone()
            .should_rate_limit(request)
            .await
            .map(tonic::Response::into_inner)
    }
}

/// A connection to `http://host:port`, for any service there.
pub async fn channel(url: &str) -> Channel {
    let endpoint = Channel::from_shared(url.to_owned()).expect("a URL");
    endpoint.connect().await.expect("a connection")
}

/// A request of descriptors in domain `edge`.
pub fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest {
        domain: "edge".to_owned(),
        descriptors,
        hits_addend: 0,
    }
}

/// A descriptor of one entry.
pub fn descriptor(key: &str, value: &str) -> RateLimitDescriptor {
    let entry = Entry {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    RateLimitDescriptor {
        entries: vec![entry],
        ..RateLimitDescriptor::default()
    }
}
