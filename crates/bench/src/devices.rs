//! `thruway bench devices`: every provider, device and port, and why something is unavailable.

use serde_json::{Value, json};
use thruway_cli::Common;
use thruway_fabric::{DeviceAttributes, iwarp, shm, verbs};

fn capabilities(a: &DeviceAttributes) -> Value {
    json!({
        "max_sge": a.max_sge, "max_queue": a.max_queue, "max_inline": a.max_inline,
        "max_read_depth": a.max_read_depth, "max_private_data": a.max_private_data,
        "max_reply_data": a.max_reply_data,
        "atomics": a.atomics, "immediate": a.immediate, "remote_invalidate": a.remote_invalidate,
        "windows": a.windows, "max_shared_receives": a.max_srq_wr, "on_demand": a.on_demand,
        "auto_progress": a.auto_progress,
    })
}

fn row(provider: &str, device: Value, rest: Value) -> Value {
    let mut row = serde_json::Map::new();
    row.insert("provider".into(), provider.into());
    row.insert("device".into(), device);
    if let Value::Object(rest) = rest {
        row.extend(rest);
    }
    Value::Object(row)
}

fn rows() -> Vec<Value> {
    let mut rows = Vec::new();
    for (provider, opened) in [("iwarp", iwarp::Config::default().open()), ("shm", shm::Config::default().open())] {
        rows.push(match opened {
            Ok(device) => {
                let a = device.attributes();
                row(provider, a.name.clone().into(), json!({"available": true, "capabilities": capabilities(a)}))
            }
            Err(why) => row(provider, Value::Null, json!({"available": false, "why": why.to_string()})),
        });
    }
    let found = match verbs::devices() {
        Ok(found) => found,
        Err(why) => {
            rows.push(row("verbs", Value::Null, json!({"available": false, "why": why.to_string()})));
            return rows;
        }
    };
    if found.is_empty() {
        let why = "rdma-core is installed, but the kernel has no RDMA device";
        rows.push(row("verbs", Value::Null, json!({"available": false, "why": why})));
    }
    for device in found {
        let ports: Vec<Value> = device
            .ports
            .iter()
            .map(|p| json!({"port": p.number, "state": p.state, "active": p.active, "link_layer": p.link_layer}))
            .collect();
        let active = device.ports.iter().any(|p| p.active);
        let mut rest = json!({"kind": device.kind, "interface": device.interface, "ports": ports});
        let opened = verbs::Config { device: Some(device.name.clone()) }.open();
        match opened {
            Ok(opened) => {
                rest["available"] = active.into();
                rest["capabilities"] = capabilities(opened.attributes());
                if !active {
                    rest["why"] = "no port is active".into();
                }
            }
            Err(why) => {
                rest["available"] = false.into();
                rest["why"] = why.to_string().into();
            }
        }
        rows.push(row("verbs", device.name.into(), rest));
    }
    rows
}

/// Runs the command.
pub(super) fn run(common: &Common) {
    let rows = rows();
    if common.json {
        thruway_cli::say!("{}", Value::Array(rows));
        return;
    }
    for row in &rows {
        let text = |key: &str| row[key].as_str().unwrap_or("-").to_string();
        let state =
            if row["available"] == true { "available".to_string() } else { format!("unavailable: {}", text("why")) };
        thruway_cli::say!("{:<6} {:<10} {state}", text("provider"), text("device"));
        if let Some(kind) = row["kind"].as_str() {
            thruway_cli::say!("       {kind}, interface {}", text("interface"));
        }
        for port in row["ports"].as_array().into_iter().flatten() {
            thruway_cli::say!(
                "       port {}: {}, {}",
                port["port"],
                text_of(&port["state"]),
                text_of(&port["link_layer"])
            );
        }
        if let Some(c) = row["capabilities"].as_object() {
            let list: Vec<String> = c.iter().map(|(k, v)| format!("{k} {v}")).collect();
            thruway_cli::say!("       {}", list.join(", "));
        }
    }
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}
