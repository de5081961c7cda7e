//! HTTP through a real Envoy and the built binary: what a client sees.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use support::{
    envoy::{Envoy, Host, Setup},
    free_port,
    http::{Reply, get, get_with},
    slidegate::Slidegate,
    upstream::Upstream,
    wait_until,
};

/// Signed with the key in `support/envoy.yaml`: issuer `test`, valid until 2100.
const ACME: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJ0ZXN0IiwidGVuYW50IjoiYWNtZSIsImV4cCI6NDEwMjQ0NDgwMH0.1U-fynsW12Tw09DFBy0ZjWHR_cpKz37254p6erVKwME";
const GLOBEX: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJ0ZXN0IiwidGVuYW50IjoiZ2xvYmV4IiwiZXhwIjo0MTAyNDQ0ODAwfQ.o-a7IMsk-A-jPiab6S74Xzaw_eXUgBNBSBavOv1SYCk";
/// As the first, with a limit of its own as a claim: 2 per DAY.
const ACME_PLAN: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJ0ZXN0IiwidGVuYW50IjoiYWNtZSIsImxpbWl0Ijp7InJlcXVlc3RzX3Blcl91bml0IjoyLCJ1bml0IjoiREFZIn0sImV4cCI6NDEwMjQ0NDgwMH0.ACn7oKEedMRh5-R62TFOQOjCvVztIeSV9YHwAw_upko";
/// As the first, by another key.
const FORGED: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJ0ZXN0IiwidGVuYW50IjoiYWNtZSIsImV4cCI6NDEwMjQ0NDgwMH0.R_5zAtciOaTew2tjklnb285JDgThG0kzr4sSNH7X-D4";

/// One Slidegate behind one Envoy.
struct Stand {
    envoy: Envoy,
    slidegate: Slidegate,
    _upstream: Upstream,
}

impl Stand {
    /// `rules` are descriptors of the domain; `limits` the rate limits of every path.
    fn start(rules: &str, limits: &str) -> Self {
        Self::start_with(rules, limits, "rls", &[])
    }

    fn start_with(rules: &str, limits: &str, cluster: &str, env: &[(&str, &str)]) -> Self {
        let upstream = Upstream::start();
        let slidegate = Slidegate::start_with(&rules_file(rules), env);
        let envoy = Envoy::start(&Setup {
            rls: &[Host::Port(slidegate.grpc_port)],
            timeout: "5s",
            upstream_port: upstream.port,
            cluster,
            routes: &route("/", limits),
        });
        Self {
            envoy,
            slidegate,
            _upstream: upstream,
        }
    }

    fn status(&self, headers: &[(&str, &str)]) -> u16 {
        self.get(headers).status
    }

    fn get(&self, headers: &[(&str, &str)]) -> Reply {
        let headers: Vec<_> = headers
            .iter()
            .map(|(name, value)| (*name, value.as_bytes()))
            .collect();
        get_with(&self.envoy.url("/"), &headers)
    }
}

fn rules_file(descriptors: &str) -> String {
    format!("domain: edge\ndescriptors:\n{descriptors}")
}

/// The route of all paths that begin so, with these rate limits (a YAML list in one line).
fn route(prefix: &str, limits: &str) -> String {
    format!(
        "              - match: {{prefix: {prefix}}}\n                route: {{cluster: upstream}}\n                \
         typed_per_filter_config:\n                  envoy.filters.http.ratelimit:\n                    \
         \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute\n                    \
         rate_limits: {limits}\n"
    )
}

const GENERIC: &str = "[{actions: [{generic_key: {descriptor_value: all}}]}]";

#[test]
fn over_the_limit_is_429_with_headers_that_tell_the_client_when() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {name: per-all, unit: hour, requests_per_unit: 2}}\n",
        GENERIC,
    );
    for (status, remaining) in [(200, "1"), (200, "0"), (429, "0"), (429, "0")] {
        let reply = stand.get(&[]);
        assert_eq!(reply.status, status, "{reply:?}");
        assert_eq!(
            reply.header("x-ratelimit-limit"),
            "2, 2;w=3600;name=\"per-all\""
        );
        assert_eq!(reply.header("x-ratelimit-remaining"), remaining);
        let reset: u64 = reply.header("x-ratelimit-reset").parse().unwrap();
        assert!((3_500..=3_600).contains(&reset), "{reset}");
        assert_eq!(
            reply.header("x-envoy-ratelimited"),
            if status == 429 { "true" } else { "" }
        );
        assert_eq!(reply.body, if status == 429 { "" } else { "upstream" });
    }
}

#[test]
fn a_request_without_a_decision_is_a_500_in_these_tests() {
    let mut stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 2}}\n",
        GENERIC,
    );
    stand.slidegate.process.signal("TERM");
    assert!(stand.slidegate.process.wait().success());
    assert_eq!(stand.status(&[]), 500);
    assert_eq!(stand.envoy.stat("cluster.upstream.ratelimit.error"), 1);
}

#[test]
fn a_denied_request_takes_nothing_from_the_limits_it_was_within() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 2}}\n\
         - {key: api_key, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
        "[{actions: [{generic_key: {descriptor_value: all}}]}, \
         {actions: [{request_headers: {header_name: x-api-key, descriptor_key: api_key}}]}]",
    );
    let ask = |key| stand.status(&[("x-api-key", key)]);
    assert_eq!(ask("flooder"), 200);
    for _ in 0..20 {
        assert_eq!(ask("flooder"), 429);
    }
    // Given back in the background.
    wait_until("room for another client", || ask("other") == 200);
    assert_eq!(ask("third"), 429, "two were admitted, by the limit of all");
}

#[test]
fn addresses_are_limited_apart_and_masked_ones_together() {
    let stand = Stand::start(
        "- {key: remote_address, rate_limit: {unit: hour, requests_per_unit: 1}}\n\
         - {key: masked_remote_address, rate_limit: {unit: hour, requests_per_unit: 2}}\n",
        "[{actions: [{remote_address: {}}]}, {actions: [{masked_remote_address: {v4_prefix_mask_len: 24}}]}]",
    );
    let from = |address| stand.status(&[("x-forwarded-for", address)]);
    assert_eq!(from("203.0.113.1"), 200);
    // By its own limit; what the network had taken for it is given back.
    assert_eq!(from("203.0.113.1"), 429);
    assert_eq!(from("203.0.113.2"), 200);
    assert_eq!(from("203.0.113.3"), 429, "by the network's limit");
    assert_eq!(from("203.0.114.3"), 200);
    assert_eq!(from("2001:db8::1"), 200);
    assert_eq!(from("2001:db8::1"), 429);
}

#[test]
fn header_values_are_limited_apart_whatever_their_bytes() {
    let stand = Stand::start(
        "- {key: api_key, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
        "[{actions: [{request_headers: {header_name: x-api-key, descriptor_key: api_key}}]}]",
    );
    let long = vec![b'x'; 40_000];
    let mut longer = long.clone();
    longer.push(b'y');
    let keys: [&[u8]; 6] = [b"one", b"two", b"K\xff\xfe1", b"K\xff\xfe2", &long, &longer];
    for key in keys {
        let ask = || get_with(&stand.envoy.url("/"), &[("x-api-key", key)]).status;
        assert_eq!(
            (ask(), ask()),
            (200, 429),
            "{:?}",
            String::from_utf8_lossy(&key[..key.len().min(9)])
        );
    }
    assert_eq!(
        (
            stand.status(&[("x-api-key", "")]),
            stand.status(&[("x-api-key", "")])
        ),
        (200, 429),
        "an empty value"
    );
    assert_eq!(
        (stand.status(&[]), stand.status(&[])),
        (200, 200),
        "without the header there is no descriptor"
    );
    assert_eq!(stand.envoy.stat("cluster.upstream.ratelimit.error"), 0);
}

#[test]
fn tenants_of_validated_tokens_are_limited_apart() {
    let stand = Stand::start(
        "- {key: tenant, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
        "[{actions: [{metadata: {descriptor_key: tenant, metadata_key: {key: envoy.filters.http.jwt_authn, \
         path: [{key: payload}, {key: tenant}]}}}]}]",
    );
    let ask = |token: &str| {
        let token = format!("Bearer {token}");
        get_with(
            &stand.envoy.url("/jwt"),
            &[("authorization", token.as_bytes())],
        )
        .status
    };
    assert_eq!((ask(ACME), ask(ACME)), (200, 429));
    assert_eq!((ask(GLOBEX), ask(GLOBEX)), (200, 429));
    assert_eq!(ask(FORGED), 401);
}

#[test]
fn hits_come_from_a_header() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 10}}\n",
        "[{actions: [{generic_key: {descriptor_value: all}}], hits_addend: {format: \"%REQ(x-cost)%\"}}]",
    );
    let cost = |cost| stand.status(&[("x-cost", cost)]);
    assert_eq!(cost("7"), 200);
    assert_eq!(cost("7"), 429);
    assert_eq!(
        cost("11"),
        429,
        "more than the limit never fits, and locks nobody out"
    );
    assert_eq!(cost("3"), 200);
    assert_eq!(cost("1"), 429);
    assert_eq!(cost("0"), 200, "a look at a full log is no denial");
}

#[test]
fn hits_of_the_whole_request_count_for_each_descriptor() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 10}}\n\
         - {key: api_key, rate_limit: {unit: hour, requests_per_unit: 20}}\n",
        "[{actions: [{generic_key: {descriptor_value: all}}]}, \
         {actions: [{request_headers: {header_name: x-api-key, descriptor_key: api_key}}], hits_addend: {number: 20}}]",
    );
    let left = |headers: &[(&str, &str)]| {
        let reply = stand.get(headers);
        (
            reply.status,
            reply.header("x-ratelimit-remaining").to_owned(),
        )
    };
    let is = |status, remaining: &str| (status, remaining.to_owned());
    assert_eq!(left(&[("x-hits", "7")]), is(200, "3"));
    assert_eq!(left(&[("x-hits", "4")]), is(429, "0"));
    assert_eq!(left(&[("x-hits", "0")]), is(200, "2"), "0 is 1 here");
    assert_eq!(
        left(&[("x-hits", "2"), ("x-api-key", "k")]),
        is(200, "0"),
        "the descriptor's own hits win where it has some"
    );
    assert_eq!(stand.status(&[]), 429);
}

#[test]
fn a_refund_makes_room_again() {
    let upstream = Upstream::start();
    let slidegate = Slidegate::start(&rules_file(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 3}}\n",
    ));
    let refund = "[{actions: [{generic_key: {descriptor_value: all}}], \
                  hits_addend: {number: 2, is_negative_hits: true}}]";
    let envoy = Envoy::start(&Setup {
        rls: &[Host::Port(slidegate.grpc_port)],
        timeout: "5s",
        upstream_port: upstream.port,
        cluster: "rls",
        routes: &(route("/refund", refund) + &route("/", GENERIC)),
    });
    let ask = |path| get(&envoy.url(path)).status;
    assert_eq!([(); 4].map(|()| ask("/")), [200, 200, 200, 429]);
    assert_eq!(ask("/refund"), 200, "on a full log");
    assert_eq!([(); 3].map(|()| ask("/")), [200, 200, 429]);
    assert_eq!(
        [(); 3].map(|()| ask("/refund")),
        [200; 3],
        "also of nothing"
    );
    assert_eq!(
        [(); 4].map(|()| ask("/")),
        [200, 200, 200, 429],
        "and no more than was taken"
    );
}

#[test]
fn a_limit_of_the_route_takes_the_place_of_the_rule() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 100}}\n",
        "[{actions: [{generic_key: {descriptor_value: all}}], limit: {rate_limit: {requests_per_unit: 1, unit: DAY}}}]",
    );
    let first = stand.get(&[]);
    assert_eq!(
        (first.status, first.header("x-ratelimit-limit")),
        (200, "1, 1;w=86400")
    );
    assert_eq!(stand.status(&[]), 429);
}

#[test]
fn a_claim_can_name_the_limit() {
    let metadata = |claim: &str| {
        format!(
            "metadata_key: {{key: envoy.filters.http.jwt_authn, path: [{{key: payload}}, {{key: {claim}}}]}}"
        )
    };
    let stand = Stand::start(
        "- {key: tenant, rate_limit: {unit: hour, requests_per_unit: 3}}\n",
        &format!(
            "[{{actions: [{{metadata: {{descriptor_key: tenant, {}}}}}], limit: {{dynamic_metadata: {{{}}}}}}}]",
            metadata("tenant"),
            metadata("limit")
        ),
    );
    let ask = |token: &str| {
        let token = format!("Bearer {token}");
        let reply = get_with(
            &stand.envoy.url("/jwt"),
            &[("authorization", token.as_bytes())],
        );
        (reply.status, reply.header("x-ratelimit-limit").to_owned())
    };
    let day = |status| (status, "2, 2;w=86400".to_owned());
    let hour = |status| (status, "3, 3;w=3600".to_owned());
    assert_eq!(ask(ACME_PLAN), day(200));
    assert_eq!(ask(ACME_PLAN), day(200));
    assert_eq!(ask(ACME_PLAN), day(429));
    assert_eq!(ask(ACME), hour(200), "without the claim the rule holds");
}

#[test]
fn shadowed_rules_count_and_never_deny() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
        GENERIC,
    );
    for _ in 0..3 {
        assert_eq!(stand.status(&[]), 200);
    }
    let shadowed =
        r#"ratelimit_service_rate_limit_shadow_mode{domain="edge",key1="generic_key_all"}"#;
    assert_eq!(stand.slidegate.metric(shadowed), 2.0);
}

#[test]
fn several_limits_on_one_descriptor_must_all_admit() {
    let stand = Stand::start(
        "- key: generic_key\n  value: all\n  rate_limits:\n  - {unit: hour, requests_per_unit: 2}\n  \
         - {window: 90m, requests: 1, name: slow}\n",
        GENERIC,
    );
    let first = stand.get(&[]);
    assert_eq!(
        (first.status, first.header("x-ratelimit-limit")),
        (200, "1, 1;w=5400;name=\"slow\"")
    );
    assert_eq!(stand.status(&[]), 429);
}

#[test]
fn tokens_are_looked_at_first_and_charged_when_the_response_ends() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 100}}\n",
        "[{actions: [{generic_key: {descriptor_value: all}}], hits_addend: {number: 0}}, \
         {actions: [{generic_key: {descriptor_value: all}}], apply_on_stream_done: true, \
         hits_addend: {format: \"%RESP(x-tokens)%\"}}]",
    );
    let counted = || {
        let hits =
            r#"ratelimit_service_rate_limit_total_hits{domain="edge",key1="generic_key_all"}"#;
        stand.slidegate.metric(hits)
    };
    for (number, tokens) in ["60", "60"].into_iter().enumerate() {
        assert_eq!(stand.status(&[("x-tokens", tokens)]), 200);
        let charged = 60.0 * (number + 1) as f64;
        wait_until("the charge", || counted() >= charged);
    }
    // 120 of 100 are spent: the second charge was kept though it did not fit.
    assert_eq!(stand.status(&[("x-tokens", "1")]), 429);
}

#[test]
fn cluster_names_that_the_http_library_refuses_are_served() {
    for cluster in [
        "outbound|8081||ratelimit.default.svc.cluster.local",
        "ratelimit/default/8081",
    ] {
        let stand = Stand::start_with(
            "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 3}}\n",
            GENERIC,
            cluster,
            &[],
        );
        let statuses = [(); 5].map(|()| stand.status(&[]));
        assert_eq!(statuses, [200, 200, 200, 429, 429], "{cluster}");
        assert!(
            stand
                .slidegate
                .metric("slidegate_connections_authority_rewritten_total")
                >= 1.0
        );
        assert_eq!(stand.envoy.stat("cluster.upstream.ratelimit.error"), 0);
    }
}

#[test]
fn good_and_refused_names_share_a_connection() {
    // The filter with the good name asks first on every connection, then the one with the cluster's.
    let stand = Stand::start_with(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 10}}\n\
         - {key: second, rate_limit: {unit: hour, requests_per_unit: 100}}\n",
        GENERIC,
        "outbound|8081||ratelimit.default.svc.cluster.local",
        &[],
    );
    for number in 0..20 {
        let status = if number < 10 { 200 } else { 429 };
        assert_eq!(stand.status(&[("x-second", "x")]), status, "{number}");
    }
    let hits = |rule: &str| {
        let series =
            format!("ratelimit_service_rate_limit_total_hits{{domain=\"edge\",key1=\"{rule}\"}}");
        stand.slidegate.metric(&series)
    };
    assert_eq!((hits("second"), hits("generic_key_all")), (20.0, 20.0));
    assert_eq!(stand.envoy.stat("cluster.upstream.ratelimit.error"), 0);
}

/// Clients that ask without a pause until they are dropped, and count what they saw.
struct Load {
    stop: Arc<AtomicBool>,
    seen: Arc<[AtomicUsize; 3]>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Load {
    fn start(url: &str) -> Self {
        Self::of(4, url)
    }

    fn of(clients: usize, url: &str) -> Self {
        let (stop, seen) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new([const { AtomicUsize::new(0) }; 3]),
        );
        let threads = (0..clients)
            .map(|_| {
                let (url, stop, seen) = (url.to_owned(), Arc::clone(&stop), Arc::clone(&seen));
                thread::spawn(move || {
                    while !stop.load(SeqCst) {
                        let kind = match get(&url).status {
                            200 => 0,
                            429 => 1,
                            _ => 2,
                        };
                        seen[kind].fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        Self {
            stop,
            seen,
            threads,
        }
    }

    fn seen(&self, kind: usize) -> usize {
        self.seen[kind].load(SeqCst)
    }

    /// Requests that were allowed, denied, failed.
    fn end(self) -> [usize; 3] {
        self.stop.store(true, SeqCst);
        for thread in self.threads {
            thread.join().expect("a client");
        }
        [0, 1, 2].map(|kind| self.seen[kind].load(SeqCst))
    }
}

#[test]
fn a_reload_under_traffic_keeps_every_log_and_fails_nothing() {
    let rule = |requests: u32| {
        format!(
            "- {{key: generic_key, value: all, rate_limit: {{unit: day, requests_per_unit: {requests}}}}}\n"
        )
    };
    let stand = Stand::start(&rule(50), GENERIC);
    let load = Load::start(&stand.envoy.url("/"));
    wait_until("the first limit", || load.seen(1) > 0);
    assert_eq!(load.seen(0), 50);
    stand
        .slidegate
        .replace_rules("domain: edge\ndescriptors: [{key: generic_key, vlaue: all}]\n");
    wait_until("the bad reload", || {
        stand.slidegate.metric("slidegate_rules_stale") == 1.0
    });
    let page = get(&format!("{}/rlconfig", stand.slidegate.debug())).body;
    assert!(
        page.contains("edge.generic_key_all: unit=DAY requests_per_unit=50")
            && page.contains("did you mean value?"),
        "{page}"
    );
    stand.slidegate.replace_rules(&rules_file(&rule(80)));
    wait_until("the good reload", || load.seen(0) >= 80);
    assert_eq!(stand.slidegate.metric("slidegate_rules_stale"), 0.0);
    let [allowed, _, failed] = load.end();
    assert_eq!((allowed, failed), (80, 0));
}

#[test]
fn a_drain_under_traffic_fails_nothing() {
    let rules = rules_file(
        "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 1000000}}\n",
    );
    let upstream = Upstream::start();
    let mut leaving = Slidegate::start_with(&rules, &[("DRAIN_DELAY", "1s")]);
    let staying = Slidegate::start(&rules);
    let envoy = Envoy::start(&Setup {
        rls: &[Host::Port(leaving.grpc_port), Host::Port(staying.grpc_port)],
        timeout: "5s",
        upstream_port: upstream.port,
        cluster: "rls",
        routes: &route("/", GENERIC),
    });
    wait_until("two healthy hosts", || {
        envoy.stat("cluster.rls.membership_healthy") == 2
    });
    let load = Load::start(&envoy.url("/"));
    wait_until("traffic on both", || {
        leaving.metric("slidegate_connections_open") > 0.0 && load.seen(0) > 100
    });
    leaving.process.signal("TERM");
    wait_until("the end of health", || !leaving.is_healthy());
    assert_eq!(leaving.process.wait().code(), Some(0));
    let before = load.seen(0);
    wait_until("traffic after it", || load.seen(0) > before + 100);
    let [_, denied, failed] = load.end();
    assert_eq!((denied, failed), (0, 0));
    assert_eq!(envoy.stat("cluster.upstream.ratelimit.error"), 0);
}

#[test]
fn connections_that_grow_old_fail_nothing() {
    let stand = Stand::start_with(
        "- {key: generic_key, value: all, rate_limit: {unit: day, requests_per_unit: 1000000}}\n",
        GENERIC,
        "rls",
        &[("GRPC_MAX_CONNECTION_AGE", "100ms")],
    );
    let load = Load::start(&stand.envoy.url("/"));
    wait_until("thirty connections", || {
        stand
            .slidegate
            .metric("slidegate_connections_accepted_total")
            >= 30.0
    });
    let [allowed, denied, failed] = load.end();
    assert_eq!((denied, failed), (0, 0), "of {allowed}");
    for name in [
        "cluster.upstream.ratelimit.error",
        "cluster.rls.health_check.failure",
        "cluster.rls.upstream_cx_destroy_with_active_rq",
    ] {
        assert_eq!(stand.envoy.stat(name), 0, "{name}");
    }
    let counted = stand
        .slidegate
        .metric(r#"ratelimit_service_rate_limit_total_hits{domain="edge",key1="generic_key_all"}"#);
    assert_eq!(counted, allowed as f64, "each request counts once");
}

#[test]
fn calls_that_envoy_gives_up_by_the_hundred_cost_no_connection() {
    let upstream = Upstream::start();
    let slidegate = Slidegate::start(&rules_file(
        "- {key: generic_key, value: all, rate_limit: {unit: day, requests_per_unit: 1000000}}\n",
    ));
    let envoy = Envoy::start(&Setup {
        rls: &[Host::Port(slidegate.grpc_port)],
        timeout: "0.02s",
        upstream_port: upstream.port,
        cluster: "rls",
        routes: &route("/", GENERIC),
    });
    let load = Load::of(24, &envoy.url("/"));
    let accepted = || slidegate.metric("slidegate_connections_accepted_total");
    // Both of Envoy's workers, and its health check.
    wait_until("all connections", || accepted() >= 3.0);
    // Frozen: everything times out, and the resets wait in the sockets behind the calls they belong to.
    slidegate.process.signal("STOP");
    let before = load.seen(2);
    wait_until("calls given up", || load.seen(2) >= before + 500);
    slidegate.process.signal("CONT");
    let before = load.seen(0);
    wait_until("decisions again", || load.seen(0) > before);
    load.end();
    assert_eq!(accepted(), 3.0);
    assert_eq!(envoy.stat("cluster.rls.upstream_cx_destroy"), 0);
}

#[test]
fn a_unix_socket_is_served_whatever_the_clusters_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("rls.sock");
    let upstream = Upstream::start();
    let slidegate = Slidegate::start_with(
        &rules_file(
            "- {key: generic_key, value: all, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
        ),
        &[("GRPC_UDS", &socket.display().to_string())],
    );
    let envoy = Envoy::start(&Setup {
        rls: &[Host::Socket(&socket)],
        timeout: "5s",
        upstream_port: upstream.port,
        cluster: "outbound|8081||ratelimit.default.svc.cluster.local",
        routes: &route("/", GENERIC),
    });
    assert_eq!([(); 2].map(|()| get(&envoy.url("/")).status), [200, 429]);
    assert_eq!(envoy.stat("cluster.upstream.ratelimit.error"), 0);
    drop(slidegate);
}

#[test]
fn a_window_rolls_and_no_second_holds_more_than_its_limit() {
    let stand = Stand::start(
        "- {key: generic_key, value: all, rate_limit: {unit: second, requests_per_unit: 5}}\n",
        GENERIC,
    );
    let start = Instant::now();
    let mut allowed = Vec::new();
    while start.elapsed() < Duration::from_millis(2_500) {
        let asked = Instant::now();
        if stand.status(&[]) == 200 {
            allowed.push((asked, Instant::now()));
        }
    }
    // Each was decided between being asked and being answered: six in less than a second, however that is read, are
    // too many.
    for six in allowed.windows(6) {
        let ((_, first), (last, _)) = (six[0], six[5]);
        let (asked, _) = six[0];
        let widest = six[5].1 - asked;
        assert!(
            widest >= Duration::from_secs(1),
            "six within {widest:?} ({:?})",
            last - first
        );
    }
    assert!(allowed.len() >= 11, "{} in 2.5 s", allowed.len());
}

#[test]
fn the_example_and_the_sample_rules_fit_each_other() {
    let slidegate = Slidegate::start(include_str!("../config/edge.yaml"));
    let (port, admin_port, service) = (free_port(), free_port(), free_port());
    let mut config = include_str!("../examples/envoy/envoy.yaml").to_owned();
    for (from, to) in [
        ("port_value: 10000", format!("port_value: {port}")),
        ("port_value: 9901", format!("port_value: {admin_port}")),
        ("port_value: 9000", format!("port_value: {service}")),
        (
            "port_value: 8081",
            format!("port_value: {}", slidegate.grpc_port),
        ),
        // For a crowded machine.
        ("timeout: 0.05s", "timeout: 10s".to_owned()),
    ] {
        assert!(config.contains(from), "no {from} in the example");
        config = config.replace(from, &to);
    }
    let envoy = Envoy::start_with(&config, port, admin_port);
    wait_until("a healthy host", || {
        envoy.stat("cluster.slidegate.membership_healthy") == 1
    });
    let ask = |path: &str, header: (&str, &str)| {
        get_with(&envoy.url(path), &[(header.0, header.1.as_bytes())])
    };
    let login = |key| ask("/login", ("x-api-key", key)).status;
    assert_eq!([(); 5].map(|()| login("k1")), [200, 200, 200, 429, 429]);
    assert_eq!(login("k2"), 200);

    // Three answers of 90,000 tokens spend the 200,000 of a day; charges arrive a moment after the answers.
    let chat = |key| ask("/chat", ("x-api-key", key)).status;
    let spent = || {
        slidegate
            .metric(r#"ratelimit_service_rate_limit_total_hits{domain="edge",key1="llm_tokens"}"#)
    };
    for answers in 1..=3 {
        assert_eq!(chat("k1"), 200, "{answers}");
        wait_until("the charge", || spent() >= 90_000.0 * f64::from(answers));
    }
    assert_eq!((chat("k1"), chat("k2")), (429, 200));

    // The token that the page shows.
    let page = include_str!("../examples/envoy/README.md");
    let token = page
        .lines()
        .find_map(|line| line.trim().strip_prefix("TOKEN="))
        .expect("a token");
    let tenant = ask("/", ("authorization", &format!("Bearer {token}")));
    let limits = tenant.header("x-ratelimit-limit");
    assert_eq!(tenant.status, 200, "{tenant:?}");
    // Of the rule's two limits the tighter one stands for both.
    let of_the_tenant = ["burst", "sustained"].map(|name| limits.contains(name));
    assert!(
        of_the_tenant == [true, false] || of_the_tenant == [false, true],
        "{limits}"
    );
    assert!(
        limits.contains("500;w=1") && limits.contains("300;w=1"),
        "{limits}"
    );
    let forged = format!("Bearer {}x", &token[..token.len() - 2]);
    assert_eq!(ask("/", ("authorization", &forged)).status, 401);
    assert_eq!(envoy.stat("cluster.service.ratelimit.error"), 0);
}
