//! `/json`: the same call for clients without gRPC, in protobuf's JSON. The descriptor set does the translation by
//! way of the binary form, so both edges read one message.

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};

use crate::wire::{DESCRIPTORS, RateLimitRequest, RateLimitResponse};

/// Translates both messages of the call.
#[derive(Clone, Debug)]
pub struct Translator {
    request: MessageDescriptor,
    response: MessageDescriptor,
}

/// The descriptor set lacks a message of the call.
#[derive(Debug, thiserror::Error)]
#[error("the descriptor set of the service is broken: {0}")]
pub struct BrokenDescriptors(String);

/// A text that is no request.
#[derive(Debug, thiserror::Error)]
pub enum NoRequest {
    /// It is not JSON, or not of the request's shape.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// It does not fit the binary form.
    #[error(transparent)]
    Binary(#[from] prost::DecodeError),
}

// === impl Translator ===

impl Translator {
    /// From the descriptor set of the build.
    pub fn new() -> Result<Self, BrokenDescriptors> {
        let pool = DescriptorPool::decode(DESCRIPTORS)
            .map_err(|error| BrokenDescriptors(error.to_string()))?;
        let message = |name: &str| {
            let name = format!("envoy.service.ratelimit.v3.{name}");
            pool.get_message_by_name(&name)
                .ok_or_else(|| BrokenDescriptors(format!("no message {name}")))
        };
        Ok(Self {
            request: message("RateLimitRequest")?,
            response: message("RateLimitResponse")?,
        })
    }

    /// Camel-case and snake-case names are read; unknown names are refused.
    pub fn request(&self, text: &[u8]) -> Result<RateLimitRequest, NoRequest> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let message = DynamicMessage::deserialize(self.request.clone(), &mut json)?;
        json.end()?;
        Ok(RateLimitRequest::decode(
            message.encode_to_vec().as_slice(),
        )?)
    }

    /// Defaults are left out, enums are names, durations are like `"40s"`.
    pub fn response(&self, response: &RateLimitResponse) -> Result<Vec<u8>, NoRequest> {
        let binary = response.encode_to_vec();
        let message = DynamicMessage::decode(self.response.clone(), binary.as_slice())?;
        let mut text = Vec::with_capacity(4 * binary.len());
        message.serialize_with_options(
            &mut serde_json::Serializer::new(&mut text),
            &SerializeOptions::new(),
        )?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<RateLimitRequest, NoRequest> {
        Translator::new().unwrap().request(text.as_bytes())
    }

    #[test]
    fn both_spellings_are_read_and_unknown_names_refused() {
        let camel = r#"{"domain":"d","hitsAddend":2,"descriptors":[{"entries":[{"key":"k","value":"ü"}],
            "limit":{"requestsPerUnit":3,"unit":"HOUR","unitMultiplier":2},"hitsAddend":"7","isNegativeHits":true}]}"#;
        let snake = r#"{"domain":"d","hits_addend":2,"descriptors":[{"entries":[{"key":"k","value":"ü"}],
            "limit":{"requests_per_unit":3,"unit":3,"unit_multiplier":2},"hits_addend":7,"is_negative_hits":true}]}"#;
        let message = request(camel).unwrap();
        assert_eq!(message, request(snake).unwrap());
        assert_eq!(message.domain, "d");
        let descriptor = &message.descriptors[0];
        assert_eq!(descriptor.entries[0].value, "ü");
        assert_eq!(descriptor.hits_addend, Some(7));
        assert_eq!(descriptor.limit.as_ref().unwrap().unit_multiplier, Some(2));
        for bad in [
            "",
            "}",
            "[]",
            "{} {}",
            r#"{"domain":1}"#,
            r#"{"domian":"d"}"#,
        ] {
            assert!(request(bad).is_err(), "{bad}");
        }
    }
}
