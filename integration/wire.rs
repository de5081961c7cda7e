//! The ports themselves: gRPC by a client that shares no code with ours, HTTP, health, reflection, signals.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::{fs, time::Duration};

use envoy_types::pb::{
    envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride,
        },
        service::ratelimit::v3::{
            RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
        },
        r#type::v3::RateLimitUnit,
    },
    google::protobuf::UInt64Value,
};
use support::{
    http,
    rls::{self, Client, descriptor, request},
    slidegate::Slidegate,
    wait_until,
};
use tonic::Code as Grpc;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

const RULES: &str = "domain: edge
descriptors:
- {key: hour, rate_limit: {name: per-hour, unit: hour, requests_per_unit: 5}}
- {key: week, rate_limit: {unit: week, requests_per_unit: 5}}
- {key: free, rate_limit: {unlimited: true}}
- {key: large, rate_limit: {unit: hour, requests_per_unit: 1000}}
";

fn with_hits(key: &str, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value: hits }),
        ..descriptor(key, "x")
    }
}

fn remaining(answer: &RateLimitResponse) -> Vec<u32> {
    answer
        .statuses
        .iter()
        .map(|status| status.limit_remaining)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_independent_client_reads_every_field() {
    let slidegate = Slidegate::start_with(
        RULES,
        &[
            ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
            ("LIMIT_LIMIT_HEADER", "X-Limit"),
        ],
    );
    let client = Client::connect(&slidegate.grpc()).await;
    let all = vec![
        descriptor("hour", "x"),
        descriptor("week", "x"),
        descriptor("free", "x"),
        descriptor("none", "x"),
    ];
    let answer = client.ask(request(all)).await.unwrap();
    let limited = |unit: Unit, name: &str, seconds| DescriptorStatus {
        code: Code::Ok.into(),
        current_limit: Some(RateLimit {
            requests_per_unit: 5,
            unit: unit.into(),
            name: name.to_owned(),
        }),
        limit_remaining: 4,
        duration_until_reset: Some(envoy_types::pb::google::protobuf::Duration {
            seconds,
            nanos: 0,
        }),
        quota: None,
    };
    let unlimited = |remaining| DescriptorStatus {
        code: Code::Ok.into(),
        limit_remaining: remaining,
        ..DescriptorStatus::default()
    };
    assert_eq!(answer.overall_code(), Code::Ok);
    assert_eq!(
        answer.statuses,
        [
            limited(Unit::Hour, "per-hour", 3_600),
            limited(Unit::Week, "", 604_800),
            unlimited(u32::MAX),
            unlimited(0)
        ]
    );
    let headers: Vec<_> = answer
        .response_headers_to_add
        .iter()
        .map(|one| (one.key.as_str(), one.value.as_str()))
        .collect();
    assert_eq!(
        headers,
        [
            ("x-limit", "5"),
            ("ratelimit-remaining", "4"),
            ("ratelimit-reset", "3600")
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn hits_looks_refunds_and_overrides_mean_what_envoy_means() {
    let slidegate = Slidegate::start(RULES);
    let client = Client::connect(&slidegate.grpc()).await;
    let ask = async |descriptor| client.ask(request(vec![descriptor])).await.unwrap();
    assert_eq!(remaining(&ask(descriptor("hour", "x")).await), [4]);
    assert_eq!(remaining(&ask(with_hits("hour", 3)).await), [1]);
    assert_eq!(
        ask(with_hits("hour", 2)).await.overall_code(),
        Code::OverLimit
    );
    let refund = RateLimitDescriptor {
        is_negative_hits: true,
        ..with_hits("hour", 3)
    };
    assert_eq!(remaining(&ask(refund).await), [4]);
    assert_eq!(
        remaining(&ask(with_hits("hour", 0)).await),
        [4],
        "a look takes nothing"
    );
    assert_eq!(remaining(&ask(with_hits("hour", 0)).await), [4]);
    assert_eq!(
        ask(with_hits("hour", 9)).await.overall_code(),
        Code::Ok,
        "a charge, since the rule was looked at"
    );
    assert_eq!(
        ask(with_hits("hour", 0)).await.overall_code(),
        Code::OverLimit
    );
    let limited = |unit: RateLimitUnit| RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit: 2,
            unit: unit.into(),
        }),
        ..descriptor("other", "x")
    };
    assert_eq!(remaining(&ask(limited(RateLimitUnit::Day)).await), [1]);
    let ignored = ask(limited(RateLimitUnit::Unknown)).await;
    assert_eq!(
        (ignored.overall_code(), &ignored.statuses[0].current_limit),
        (Code::Ok, &None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn long_values_get_a_decision_and_too_long_messages_an_error_that_ejects_nobody() {
    let slidegate = Slidegate::start(RULES);
    let client = Client::connect(&slidegate.grpc()).await;
    let long = |length| request(vec![descriptor("hour", &"x".repeat(length))]);
    for length in [1_000, 3 << 20, 1_000] {
        let answer = client.ask(long(length)).await.unwrap();
        assert_eq!(answer.overall_code(), Code::Ok);
    }
    assert_eq!(remaining(&client.ask(long(3 << 20)).await.unwrap()), [3]);
    let error = client.ask(long(5 << 20)).await.unwrap_err();
    assert_eq!(error.code(), Grpc::Unknown, "{error}");
    let many = (0..1_500).map(|_| descriptor("hour", "y")).collect();
    let error = client.ask(request(many)).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message().contains("MAX_DESCRIPTORS")),
        (Grpc::Unknown, true),
        "{error}"
    );
    assert_eq!(
        client.ask(long(10)).await.unwrap().overall_code(),
        Code::Ok,
        "on the same connection"
    );
    assert_eq!(slidegate.metric("slidegate_calls_over_bound_total"), 2.0);
    assert_eq!(
        slidegate.metric("slidegate_connections_accepted_total"),
        1.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_references_words_and_status() {
    let slidegate = Slidegate::start(RULES);
    let client = Client::connect(&slidegate.grpc()).await;
    let mut no_domain = request(vec![descriptor("hour", "x")]);
    no_domain.domain.clear();
    for (request, words) in [
        (no_domain, "rate limit domain must not be empty"),
        (
            request(vec![]),
            "rate limit descriptor list must not be empty",
        ),
    ] {
        let error = client.ask(request).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Grpc::Unknown, words));
    }
    let errors = r#"ratelimit_service_should_rate_limit_error{err_type="service_error"}"#;
    assert_eq!(slidegate.metric(errors), 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_message_are_an_error_and_no_crash() {
    let slidegate = Slidegate::start(RULES);
    let channel = rls::channel(&slidegate.grpc()).await;
    // A text in field 3, where this service has a number.
    let message = ServerReflectionRequest {
        host: "edge".to_owned(),
        message_request: Some(MessageRequest::FileByFilename("x".to_owned())),
    };
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let codec = tonic_prost::ProstCodec::<ServerReflectionRequest, HealthCheckRequest>::default();
    let error = grpc
        .unary(tonic::Request::new(message), path.parse().unwrap(), codec)
        .await
        .unwrap_err();
    assert_eq!(error.code(), Grpc::Unknown, "{error}");
    let errors = r#"ratelimit_service_should_rate_limit_error{err_type="service_error"}"#;
    assert_eq!(slidegate.metric(errors), 1.0);
    let client = Client::connect(&slidegate.grpc()).await;
    let answer = client.ask(request(vec![descriptor("hour", "x")])).await;
    assert_eq!(remaining(&answer.unwrap()), [4]);
}

async fn health(slidegate: &Slidegate, service: &str) -> Result<ServingStatus, Grpc> {
    let channel = rls::channel(&slidegate.grpc()).await;
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(channel).check(request).await;
    answer
        .map(|answer| answer.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_turns_before_the_end_and_calls_are_still_answered() {
    let mut slidegate = Slidegate::start_with(RULES, &[("DRAIN_DELAY", "2s")]);
    let client = Client::connect(&slidegate.grpc()).await;
    let names = [
        "",
        "ratelimit",
        "envoy.service.ratelimit.v3.RateLimitService",
    ];
    for name in names {
        assert_eq!(
            health(&slidegate, name).await,
            Ok(ServingStatus::Serving),
            "{name}"
        );
    }
    assert_eq!(health(&slidegate, "another").await, Err(Grpc::NotFound));
    slidegate.process.signal("TERM");
    wait_until("the end of health", || !slidegate.is_healthy());
    for name in names {
        assert_eq!(
            health(&slidegate, name).await,
            Ok(ServingStatus::NotServing),
            "{name}"
        );
    }
    let reply = http::get(&format!("{}/healthcheck", slidegate.http()));
    assert_eq!((reply.status, reply.body.as_str()), (500, ""));
    assert_eq!(
        remaining(
            &client
                .ask(request(vec![descriptor("hour", "x")]))
                .await
                .unwrap()
        ),
        [4]
    );
    assert_eq!(slidegate.process.wait().code(), Some(0));
}

#[test]
fn every_signal_that_ends_the_reference_ends_this() {
    for signal in ["TERM", "INT", "HUP"] {
        let mut slidegate = Slidegate::start(RULES);
        slidegate.process.signal(signal);
        assert_eq!(slidegate.process.wait().code(), Some(0), "{signal}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_names_the_services_and_their_messages() {
    let slidegate = Slidegate::start(RULES);
    let channel = rls::channel(&slidegate.grpc()).await;
    let ask = async |message| {
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(message),
        };
        let mut client = ServerReflectionClient::new(channel.clone());
        let mut answers = client
            .server_reflection_info(tokio_stream::iter([request]))
            .await
            .unwrap()
            .into_inner();
        answers
            .message()
            .await
            .unwrap()
            .unwrap()
            .message_response
            .unwrap()
    };
    let MessageResponse::ListServicesResponse(services) =
        ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list");
    };
    let names: Vec<_> = services
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    assert!(
        names.contains(&"envoy.service.ratelimit.v3.RateLimitService"),
        "{names:?}"
    );
    assert!(names.contains(&"grpc.health.v1.Health"), "{names:?}");
    let symbol = "envoy.service.ratelimit.v3.RateLimitService".to_owned();
    let answer = ask(MessageRequest::FileContainingSymbol(symbol)).await;
    assert!(
        matches!(answer, MessageResponse::FileDescriptorResponse(_)),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unix_sockets_and_ipv6_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("rls.sock");
    let path = socket.display().to_string();
    // A file that a dead process left.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let mut slidegate = Slidegate::start_with(RULES, &[("GRPC_UDS", &path)]);
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_slidegate"))
        .args([
            "bench",
            &format!("unix:{path}"),
            "--descriptor",
            "large=x",
            "--requests",
            "50",
            "--in-flight",
            "2",
        ])
        .output()
        .unwrap();
    assert!(
        run.status.success() && String::from_utf8_lossy(&run.stdout).contains("OK 50"),
        "{run:?}"
    );
    slidegate.process.signal("TERM");
    assert_eq!(slidegate.process.wait().code(), Some(0));
    assert!(!socket.exists());

    for host in ["::1", "::"] {
        let everywhere = [("GRPC_HOST", host), ("HOST", host), ("DEBUG_HOST", host)];
        let slidegate = Slidegate::start_unchecked(RULES, &everywhere);
        for (port, path) in [
            (slidegate.http_port, "healthcheck"),
            (slidegate.debug_port, "rlconfig"),
        ] {
            wait_until("an answer by IPv6", || {
                http::try_get(&format!("http://[::1]:{port}/{path}"))
                    .is_some_and(|reply| reply.status == 200)
            });
        }
        assert_eq!(slidegate.is_healthy(), host == "::", "by IPv4");
        let client = Client::connect(&format!("http://[::1]:{}", slidegate.grpc_port)).await;
        assert_eq!(
            remaining(
                &client
                    .ask(request(vec![descriptor("hour", "x")]))
                    .await
                    .unwrap()
            ),
            [4]
        );
    }
}

#[test]
fn an_address_that_cannot_be_had_ends_the_start_and_is_named_with_its_cause() {
    let directory = tempfile::tempdir().unwrap();
    let held = directory.path().join("held").display().to_string();
    let nowhere = directory.path().join("no/socket").display().to_string();
    let holder = Slidegate::start_with(RULES, &[("GRPC_UDS", &held)]);
    for (path, cause) in [
        (&held, "another process listens there"),
        (&nowhere, "No such file or directory"),
    ] {
        let mut second = Slidegate::start_unchecked(RULES, &[("GRPC_UDS", path)]);
        assert_eq!(second.process.wait().code(), Some(70));
        let output = second.process.output();
        assert!(output.contains(path.as_str()), "{output}");
        assert_eq!(output.matches(cause).count(), 1, "{output}");
    }
    assert!(holder.is_healthy());
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_calls_neither_leak_nor_count_twice() {
    let slidegate = Slidegate::start(RULES);
    let client = Client::connect(&slidegate.grpc()).await;
    let mut answered = 0;
    for round in 0..600_u64 {
        let call = client.ask(request(vec![descriptor("large", "x")]));
        let patience = Duration::from_micros(round % 400);
        answered += u64::from(tokio::time::timeout(patience, call).await.is_ok());
    }
    // Calls that nobody waits for may be decided a moment later.
    let counted = || {
        slidegate.metric(r#"ratelimit_service_rate_limit_total_hits{domain="edge",key1="large"}"#)
    };
    let mut before = -1.0;
    wait_until("the end of all calls", || {
        counted() == std::mem::replace(&mut before, counted())
    });
    let look = client.ask(request(vec![with_hits("large", 0)])).await;
    let used = 1_000 - u64::from(look.unwrap().statuses[0].limit_remaining);
    assert!(
        (answered..=600).contains(&used),
        "{used} used of 600 calls, {answered} answered"
    );
    assert_eq!(counted(), used as f64, "what is logged is what is counted");
    assert_eq!(
        slidegate.metric("slidegate_connections_accepted_total"),
        1.0,
        "and the connection lived on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_resets_keeps_the_connection_and_the_count() {
    const CALLS: u64 = 20_000;
    let slidegate = Slidegate::start(
        "domain: edge\ndescriptors: [{key: large, rate_limit: {unit: hour, requests_per_unit: 1000000}}]\n",
    );
    let client = Client::connect(&slidegate.grpc()).await;
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..CALLS {
        let client = client.clone();
        calls.spawn(async move {
            // Some are reset before they are sent, some before they are read, some after they are answered.
            let call = client.ask(request(vec![descriptor("large", "x")]));
            let patience = Duration::from_micros(number % 100 * 200);
            matches!(tokio::time::timeout(patience, call).await, Ok(Ok(_)))
        });
        if number % 100 == 99 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let answered = calls.join_all().await.into_iter().map(u64::from).sum();
    let counted = || {
        slidegate.metric(r#"ratelimit_service_rate_limit_total_hits{domain="edge",key1="large"}"#)
            as u64
    };
    let mut before = u64::MAX;
    wait_until("the end of all calls", || {
        counted() == std::mem::replace(&mut before, counted())
    });
    let look = client.ask(request(vec![with_hits("large", 0)])).await;
    let used = 1_000_000 - u64::from(look.unwrap().statuses[0].limit_remaining);
    assert!(
        (answered..=CALLS).contains(&used),
        "{used} used of {CALLS} calls, {answered} answered"
    );
    assert!(answered < used, "no call was reset after it was read");
    assert_eq!(
        slidegate.metric("slidegate_connections_accepted_total"),
        1.0,
        "the storm cost the connection"
    );
}

#[test]
fn json_answers_as_the_reference_does() {
    let slidegate = Slidegate::start(
        "domain: web\ndescriptors:\n- {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
    );
    let json = format!("{}/json", slidegate.http());
    let ask = |method: &str, body: &str| {
        let reply = http::send(method, &json, body);
        (
            reply.status,
            reply.header("content-type").to_owned(),
            reply.body,
        )
    };
    let of = |value: &str| {
        format!(
            r#"{{"domain":"web","descriptors":[{{"entries":[{{"key":"a","value":"{value}"}}]}}]}}"#
        )
    };
    let limit =
        r#""currentLimit":{"requestsPerUnit":1,"unit":"HOUR"},"durationUntilReset":"3600s""#;
    let json_type = || "application/json".to_owned();
    assert_eq!(
        ask("POST", &of("x")),
        (
            200,
            json_type(),
            format!(r#"{{"overallCode":"OK","statuses":[{{"code":"OK",{limit}}}]}}"#)
        )
    );
    let (status, _, body) = ask("POST", &of("x"));
    assert_eq!(
        (status, body.contains(r#""overallCode":"OVER_LIMIT""#)),
        (429, true),
        "{body}"
    );
    let (status, _, body) = ask(
        "POST",
        r#"{"domain":"web","descriptors":[{"entries":[{"key":"zz"}]}]}"#,
    );
    assert_eq!(
        (status, body.as_str()),
        (200, r#"{"overallCode":"OK","statuses":[{"code":"OK"}]}"#)
    );
    assert_eq!(ask("PUT", &of("z")).0, 200, "any method");
    let refused = || {
        (
            400,
            "text/plain; charset=utf-8".to_owned(),
            "Bad Request\n".to_owned(),
        )
    };
    for bad in [
        "}",
        r#"{"descriptors":[{"entries":[{"key":"a"}]}]}"#,
        r#"{"domain":"web","unknown":1}"#,
        "",
    ] {
        assert_eq!(ask("POST", bad), refused(), "{bad}");
    }
    let endless = r#"{"domain":"web","descriptors":[{"entries":[{"key":"b"}],"hitsAddend":"18446744073709551615",
        "limit":{"requestsPerUnit":4294967295,"unit":"YEAR","unitMultiplier":4294967295}}]}"#;
    let (status, _, body) = ask("POST", endless);
    assert_eq!(
        (
            status,
            body.contains(r#""durationUntilReset":"315576000000s""#)
        ),
        (200, true),
        "{body}"
    );
    let rules = http::get(&format!("{}/rlconfig", slidegate.debug()));
    assert_eq!(
        rules.body,
        "web.a: unit=HOUR requests_per_unit=1, shadow_mode: false, quota_mode: false\n"
    );
    assert!(
        http::get(&format!("{}/stats", slidegate.debug()))
            .body
            .contains("ratelimit.service.rate_limit.web.a.total_hits: 3\n")
    );
    assert!(http::get(&slidegate.debug()).body.contains("/rlconfig: "));
    assert_eq!(
        http::get(&format!("{}/nothing", slidegate.http())).status,
        404
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_first_load_is_served_with_an_error_until_a_good_one_comes() {
    let slidegate = Slidegate::start("domain: [\n");
    let client = Client::connect(&slidegate.grpc()).await;
    let error = client
        .ask(request(vec![descriptor("hour", "x")]))
        .await
        .unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Grpc::Unknown, "no rate limit configuration loaded")
    );
    assert_eq!(slidegate.metric("ratelimit_service_config_load_error"), 1.0);
    slidegate.replace_rules(RULES);
    wait_until("the good load", || {
        slidegate.metric("ratelimit_service_config_load_success") == 1.0
    });
    assert_eq!(
        remaining(
            &client
                .ask(request(vec![descriptor("hour", "x")]))
                .await
                .unwrap()
        ),
        [4]
    );
}

#[test]
fn health_waits_for_a_domain_where_that_is_asked_for() {
    let slidegate = Slidegate::start_unchecked(
        "domain: ''\n",
        &[("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "true")],
    );
    let healthcheck =
        || http::try_get(&format!("{}/healthcheck", slidegate.http())).map(|reply| reply.status);
    wait_until("an answer", || healthcheck() == Some(500));
    slidegate.replace_rules(RULES);
    wait_until("health", || healthcheck() == Some(200));
}

#[test]
fn a_prometheus_port_of_its_own_is_served_when_asked_for() {
    let port = support::free_port().to_string();
    let address = format!("127.0.0.1:{port}");
    let _slidegate = Slidegate::start_with(
        RULES,
        &[
            ("USE_PROMETHEUS", "true"),
            ("PROMETHEUS_ADDR", &address),
            ("PROMETHEUS_PATH", "/numbers"),
        ],
    );
    let reply = http::get(&format!("http://{address}/numbers"));
    assert_eq!(
        reply.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
    assert!(
        reply
            .body
            .contains("ratelimit_service_config_load_success 1\n"),
        "{}",
        reply.body
    );
}

#[test]
fn the_layout_of_a_config_map_is_read_and_watched() {
    let root = tempfile::tempdir().unwrap();
    let config = root.path().join("config");
    let put = |version: &str, requests: u32| {
        let directory = config.join(format!("..{version}"));
        fs::create_dir_all(&directory).unwrap();
        let rules = format!(
            "domain: edge\ndescriptors:\n- {{key: hour, rate_limit: {{unit: hour, requests_per_unit: {requests}}}}}\n"
        );
        fs::write(directory.join("rules.yaml"), rules).unwrap();
        std::os::unix::fs::symlink(format!("..{version}"), config.join("..data_tmp")).unwrap();
        fs::rename(config.join("..data_tmp"), config.join("..data")).unwrap();
    };
    put("2026_01", 5);
    std::os::unix::fs::symlink("..data/rules.yaml", config.join("rules.yaml")).unwrap();
    let path = root.path().display().to_string();
    // Not even RUNTIME_IGNOREDOTFILES=false reads a file twice.
    let slidegate = Slidegate::start_with(
        "",
        &[("RUNTIME_ROOT", &path), ("RUNTIME_IGNOREDOTFILES", "false")],
    );
    let rules = || http::get(&format!("{}/rlconfig", slidegate.debug())).body;
    assert!(rules().contains("requests_per_unit=5,"), "{}", rules());
    put("2026_02", 6);
    wait_until("the new rules", || rules().contains("requests_per_unit=6,"));
    assert_eq!(slidegate.metric("ratelimit_service_config_load_error"), 0.0);
}
